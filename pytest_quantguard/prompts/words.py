"""Common words in English and Chinese, and names that no place or person has."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal

Language = Literal["en", "zh"]

_ENGLISH = """
acorn actor airport album alley almond anchor angle ankle apple apron arch armor arrow ash attic autumn axle
badge bag baker balcony ball bamboo banana bank banner barber bark barn barrel basin basket bath beach bead
beam bean bear beard bed bee bell belt bench berry bicycle bird biscuit blade blanket block blossom boat bolt
bone bonnet book boot border bottle bowl box boy bracelet brain branch brass bread breeze brick bridge broom
brother brush bucket bud bull bus bush butter button cabin cable cactus cage cake calendar calf camel camera
camp canal candle canoe canvas cap captain car card cargo carpet carrot cart castle cat cave cedar ceiling
cellar cement chain chair chalk chapel charm cheese cherry chess chest chick child chimney chin church cider
cinema circle circus city clay cliff clock cloth cloud clove clown coach coal coast coat cobweb coffee coin
collar comb comet compass cook copper coral cork corn corner cot cotton couch cousin cow crab cradle crane
crate cream creek crop crow crown cube cup curtain curve cushion dairy daisy dam dance dawn deck deer desert
desk dew dial diamond dice dime ditch dock doctor dog doll dolphin donkey door dove dragon drain drawer dress
drill drum duck dune dusk eagle ear earth echo edge eel egg elbow elm engine envelope eye fabric face fair
falcon fan farm farmer feast feather fence fern ferry field fig film finger fire fish flag flame flask fleet
flock flood floor flour flower flute foam fog forest fork fort fountain fox frame frog frost fruit funnel
gallery garage garden garlic gate gem ghost giant ginger giraffe girl glass glove glue goat gold goose grain
grape grass gravel grove guard guest guide guitar gull hail hall hammer hand harbor hare harp harvest hat hawk
hay heart hedge heel helmet hen herb heron hill hinge hive hood hook horn horse hotel hour house iceberg ink
inn iron island ivy jacket jar jelly jewel judge jug juice jungle kettle key king kitchen kite kitten knee
knife knight knot label lace ladder lake lamb lamp lantern lark lawn lawyer leaf leather ledge lemon lens
letter lever lily lime linen lion lizard loaf lobster lock log lunch magnet maple map marble market marsh mask
mast meadow medal melon mill mineral mint mirror mist mole monk moon moss moth mountain mouse mud mule museum
music mustard nail napkin neck needle nest net nickel night nurse nut oak oasis oat ocean office olive onion
orange orbit orchard otter oven owl oyster paddle page paint palace palm pan panda paper parade parcel parrot
pasture path peach peacock pear pearl pebble pen pencil pepper piano picnic pie pier pig pigeon pillow pilot
pine pipe pirate planet plant plate plum pocket poem poet pond pony poppy porch potato pottery prince pump
pumpkin puppy purse puzzle quail queen quilt rabbit radio raft rail rain ramp raven razor reef ribbon rice
ring river road robe robin rock roof room root rope rose ruby rug ruler saddle sail salad salt sand satin
sauce saw scarf school scissors screw sea seal seed shadow shark sheep shelf shell shepherd ship shirt shoe
shop shore shovel silk silver singer sink sister skate skirt sky sleeve slope smoke snail snow soap sock sofa
soil soldier soup spade spark sparrow spice spider spinach spoon spring square squirrel stable stair star
station statue steam steel stem step stone stool storm stove straw stream street string sugar suit summer sun
swan sword table tailor tea teacher temple tent thread throne thumb thunder ticket tide tiger tile timber tin
toad toast tomato torch tower town toy track train tray tree trumpet trunk tulip tunnel turkey turtle valley
vase velvet village vine violin wagon wall walnut wave wax weaver well whale wheat wheel whistle wind window
wine wing winter wolf wood wool yard zebra
"""

_CHINESE = """
苹果 香蕉 葡萄 西瓜 樱桃 柠檬 草莓 石榴 核桃 花生 玉米 小麦 土豆 白菜 萝卜 辣椒 豆腐 面包 饺子 蛋糕 牛奶
茶叶 咖啡 蜂蜜 桌子 椅子 窗户 门口 地板 屋顶 楼梯 厨房 书房 花园 院子 围墙 道路 桥梁 隧道 车站 机场 码头
港口 市场 商店 银行 邮局 医院 学校 公园 剧院 工厂 农田 果园 森林 草原 沙漠 高山 峡谷 河流 湖泊 海洋 岛屿
沙滩 瀑布 泉水 冰川 火山 天空 太阳 月亮 星星 云彩 彩虹 闪电 雷声 大雨 雪花 微风 雾气 霜冻 春天 夏天 秋天
冬天 早晨 中午 黄昏 夜晚 昨天 明天 老虎 狮子 大象 长颈鹿 猴子 兔子 狐狸 松鼠 刺猬 骆驼 绵羊 山羊 水牛
骏马 小狗 小猫 鹦鹉 燕子 麻雀 老鹰 天鹅 孔雀 海豚 鲸鱼 鲨鱼 乌龟 青蛙 蝴蝶 蜜蜂 蚂蚁 蜻蜓 牡丹 荷花 菊花
梅花 兰花 玫瑰 竹子 松树 柳树 枫叶 种子 树根 医生 老师 工人 农民 司机 厨师 画家 诗人 歌手 演员 警察 士兵
船长 木匠 裁缝 父亲 母亲 哥哥 妹妹 朋友 邻居 客人 铅笔 钢笔 毛笔 墨水 纸张 书本 字典 地图 信封 邮票 日历
钟表 镜子 雨伞 帽子 手套 围巾 外套 毛衣 裤子 鞋子 袜子 纽扣 剪刀 针线 锤子 钉子 锯子 梯子 绳子 水桶 扫帚
毛巾 肥皂 枕头 被子 地毯 灯笼 蜡烛 火柴 风筝 皮球 棋盘 钢琴 吉他 笛子 二胡 鼓声 电话 电视 收音机 相机
电脑 手机 汽车 火车 飞机 轮船 自行车 马车 帆船 灯塔 城堡 宝塔 寺庙 石碑 铜像 金币 银器 玉石 珍珠 丝绸
陶瓷 木材 煤炭
"""

WORDS: Mapping[Language, tuple[str, ...]] = {
    "en": tuple(dict.fromkeys(_ENGLISH.split())),
    "zh": tuple(dict.fromkeys(_CHINESE.split())),
}

_GIVEN = """
Anna Tom Mirela Jonas Priya Kofi Lucia Haruto Elif Samuel Ines Marek
Noor Oskar Petra Ravi Sofia Tariq Ursula Viktor Wanda Yusuf Zoe Bruno
"""
GIVEN_NAMES = tuple(_GIVEN.split())
_BEGINNINGS = (
    "Bel",
    "Cor",
    "Dra",
    "El",
    "Fen",
    "Gar",
    "Hal",
    "Ith",
    "Jor",
    "Kel",
    "Lun",
    "Mor",
    "Nev",
    "Or",
    "Pel",
)
_MIDDLES = ("a", "e", "i", "o", "u", "an", "en", "ir", "or", "al", "est", "ond", "ath", "ev")
_TOWN_ENDS = ("burg", "mouth", "wick", "stead", "haven", "dale", "ford", "minster", "gate", "holm")
_RIVER_ENDS = ("na", "ra", "sel", "we", "lo", "mir", "ne", "dra")
_SURNAME_ENDS = ("ov", "ley", "sen", "ton", "mann", "ski", "ard", "well", "quist", "ano")
_CHINESE_PLACE = "青白清石龙凤云雾松柏竹梅兰金银铜玉水沙山川风雪星月日明安宁和平新古东西南北长远高深"
_CHINESE_SURNAMES = "赵钱孙李周吴郑王冯陈褚卫蒋沈韩杨朱秦许何吕张孔曹严华金魏陶姜"
_CHINESE_GIVEN = "文武明德志国建华伟强芳丽敏静秀英玉兰春梅晓东海波天宇思远嘉欣雨晨子轩"


def town_name(rng: random.Random, language: Language, parts: int = 1) -> str:
    """An invented town; more parts make longer names, of which there are more."""
    if language == "zh":
        return "".join(rng.sample(_CHINESE_PLACE, 1 + parts)) + rng.choice("镇城村港")
    return _invent(rng, parts) + rng.choice(_TOWN_ENDS)


def river_name(rng: random.Random, language: Language, parts: int = 1) -> str:
    """An invented river, in Chinese with the word for river; parts as in `town_name`."""
    if language == "zh":
        return "".join(rng.sample(_CHINESE_PLACE, 1 + parts)) + rng.choice("河江溪")
    return _invent(rng, parts) + rng.choice(_RIVER_ENDS)


def _invent(rng: random.Random, parts: int) -> str:
    return rng.choice(_BEGINNINGS) + "".join(rng.choice(_MIDDLES) for _ in range(parts))


def surname(rng: random.Random, language: Language) -> str:
    """An invented family name; in Chinese a usual one."""
    if language == "zh":
        return rng.choice(_CHINESE_SURNAMES)
    return _invent(rng, 1) + rng.choice(_SURNAME_ENDS)


def given_name(rng: random.Random, language: Language) -> str:
    """A first name."""
    if language == "zh":
        return "".join(rng.sample(_CHINESE_GIVEN, 2))
    return rng.choice(GIVEN_NAMES)


def person_name(rng: random.Random, language: Language) -> str:
    """First and family name, in the language's order."""
    if language == "zh":
        return surname(rng, language) + given_name(rng, language)
    return f"{given_name(rng, language)} {surname(rng, language)}"

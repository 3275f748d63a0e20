"""Lets torchvision's CUDA wheel import beside a CPU torch: declares the operators of its compiled part."""

import sys


class _DeclareOperators:
    def find_spec(self, name, *_):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch._torchvision_operators = library  # keeps the declarations alive
        return


sys.meta_path.insert(0, _DeclareOperators())

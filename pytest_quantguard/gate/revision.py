"""Which commit is on trial, as far as git or the CI service says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

GIT_SECONDS = 5.0
COMMIT_VARIABLES = ("GITHUB_SHA", "CI_COMMIT_SHA", "BUILDKITE_COMMIT", "GIT_COMMIT")
BRANCH_VARIABLES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BUILDKITE_BRANCH")


def revision_of(folder: Path) -> dict[str, str]:
    """commit (with "-dirty" where files differ from it), branch and CI run of the repository that holds
    `folder`; without what is not known.
    """
    commit = _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    branch = _git(folder, "symbolic-ref", "--short", "-q", "HEAD")
    found = {
        "commit": commit or _first(COMMIT_VARIABLES),
        "branch": branch or _first(BRANCH_VARIABLES),
        "ci_run": _ci_run(),
    }
    return {name: value for name, value in found.items() if value}


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # No git, or a repository too slow to ask: the environment may still say.
    return done.stdout.strip() if done.returncode == 0 else ""


def _first(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _ci_run() -> str:
    server, repository, run = (
        os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    )
    return (
        f"{server}/{repository}/actions/runs/{run}"
        if server and repository and run
        else _first(("CI_JOB_URL",))
    )

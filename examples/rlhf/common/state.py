"""Saving a whole run, and going on with it as if it had never stopped.

    OUT/checkpoints/latest                  the name of the folder to go on from, written when that folder is complete
    OUT/checkpoints/step12/actor, critic    DeepSpeed's checkpoints: what is trained, its optimizer, its schedule
    OUT/checkpoints/step12/rank0.pt ...     what else each rank has: random states, moving averages, controllers
    OUT/checkpoints/step12/run.json         the step, and the settings that must not change

Frozen weights are not in it; they come from where the run got them. Data and samples follow from the step and the seed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from basics import failing_together, random_state, restore_random_state
from options import ALL

from common.arguments import settings

LATEST = "latest"


class Checkpoints:
    """The checkpoints of a run. Made before anything is loaded, it refuses what could not be gone on with.

    Args:
        arguments: RunArguments: out (a folder that all ranks see), keep_checkpoints, resume.
        ds_config: of the run.
        more: further things that must not change, by the name that an error gives them.

    Raises:
        FileNotFoundError: --resume, and there is no checkpoint.
        FileExistsError: no --resume, and there is one.
        ValueError: it belongs to a run with other settings.
    """

    def __init__(self, arguments, ds_config: dict, more: dict | None = None) -> None:
        self._folder, self._keep = Path(arguments.out, "checkpoints"), arguments.keep_checkpoints
        # As they will be read from the file: tuples are lists then.
        self._settings = json.loads(json.dumps(settings(arguments, ds_config, dist.get_world_size()) | (more or {})))
        self._engines: Mapping = {}
        self._others: Mapping = {}
        self._found = None
        latest = self._folder / LATEST
        if arguments.resume:
            if not latest.is_file():
                raise FileNotFoundError(f"--resume: no checkpoint in {self._folder}; leave --resume out to start anew")
            self._found = self._folder / latest.read_text().strip()
            self._compare(json.loads((self._found / "run.json").read_text())["settings"])
        elif latest.is_file():
            raise FileExistsError(
                f"--out {arguments.out} holds checkpoints of an earlier run: --resume to go on with it, or give "
                "another folder"
            )

    def _compare(self, earlier: dict) -> None:
        for name in {**earlier, **self._settings}:
            then, now = earlier.get(name), self._settings.get(name)
            if then != now:
                raise ValueError(f"--resume: {name} was {then}, is {now} now; give what the run began with")

    def begin(self, engines: Mapping, others: Mapping | None = None) -> int:
        """Say what belongs to the run, and with --resume put it where it was; returns the number of steps done.

        Args:
            engines: those that are trained, by name.
            others: by name, objects with state_dict and load_state_dict, each rank's own.
        """
        self._engines, self._others = engines, others or {}
        if self._found is None:
            return 0
        for name, engine in self._engines.items():
            path, _ = engine.load_checkpoint(str(self._found), tag=name, load_module_strict=False)
            if path is None:
                raise FileNotFoundError(f"--resume: {self._found} has no checkpoint of {name}")
        path = self._found / f"rank{dist.get_rank()}.pt"
        with failing_together(f"reading {path}"):
            own = torch.load(path, weights_only=True, map_location="cpu")
        restore_random_state(own["random"])
        for name, other in self._others.items():
            other.load_state_dict(own[name])
        return json.loads((self._found / "run.json").read_text())["step"]

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps. Until its last moment the one before stays the latest."""
        target, is_main = self._folder / f"step{step}", dist.get_rank() == 0
        with failing_together("making a folder for the checkpoint"):
            if is_main:
                shutil.rmtree(target, ignore_errors=True)  # of a run that was stopped while it saved
                target.mkdir(parents=True)
        for name, engine in self._engines.items():
            engine.save_checkpoint(str(target), tag=name, save_latest=False, exclude_frozen_parameters=True)
        with failing_together("writing the checkpoint"):
            own = {"random": random_state(), **{name: other.state_dict() for name, other in self._others.items()}}
            torch.save(own, target / f"rank{dist.get_rank()}.pt")
            if is_main:
                (target / "run.json").write_text(json.dumps({"step": step, "settings": self._settings}, indent=1))
        with failing_together("naming the latest checkpoint"):  # all ranks are done by now
            if is_main:
                new = self._folder / f"{LATEST}.new"
                new.write_text(target.name)
                os.replace(new, self._folder / LATEST)
                self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Keep the latest ones, and nothing of a run that was stopped while it saved."""
        numbers = {path: path.name.removeprefix("step") for path in self._folder.glob("step*")}
        found = {int(number): path for path, number in numbers.items() if number.isdecimal()}  # not a copy of a user's
        kept = sorted(number for number in found if number <= step)
        kept = kept if self._keep == ALL else kept[-self._keep :]
        for number, path in found.items():
            if number not in kept:
                shutil.rmtree(path)

"""The folder of a model that a user names: a folder of this machine, or a model of the hub, which is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coordexp import distributed, hub
from coordexp.checkpoints.folder import Checkpoint, base_name, is_adapter_folder
from coordexp.config.schema import RunConfig
from coordexp.errors import CheckpointError, first_line


def model_folder(model: str | Path, join: Callable[[], None] | None = None) -> Path:
    """The folder of ``model``: the folder itself, or that of a model of the hub in its cache, after it was fetched with
    the model that its adapters are put on. See :func:`coordexp.hub.hub_model`.

    Under torchrun the first process of each machine fetches, at the commit that rank 0 found, and the others wait:
    a collective call, for names of the hub. ``join``: makes the process group, which has the time limit.

    Raises:
        CheckpointError: no such model or revision, no access, no network, no room, or another kind of model.
    """
    named = hub.hub_model(model)
    if named is None:
        folder = Path(model)
    elif distributed.world_size() == 1:
        folder = _fetched(hub.resolve(named))
    else:
        folder = _fetched_once(named, join or partial(distributed.join, use_cpu=False))
    if is_adapter_folder(folder) and (base := base_name(folder)) is not None and hub.hub_model(base) is not None:
        model_folder(base, join)
    return folder


def with_model_here(config: RunConfig) -> RunConfig:
    """``config`` with the folder of ``model.model``, as :func:`model_folder`."""
    training = config.training
    join = partial(distributed.join, use_cpu=training.use_cpu, timeout_s=training.ddp_timeout)
    given = config.model.model
    if hub.hub_model(given) is None and not is_adapter_folder(given):
        return config
    folder = str(model_folder(given, join))
    return config.model_copy(update={"model": config.model.model_copy(update={"model": folder})})


def _fetched(model: hub.HubModel) -> Path:
    return hub.fetch(model, lambda folder: is_adapter_folder(folder) or Checkpoint.open(folder))


def _fetched_once(named: hub.HubModel, join: Callable[[], None]) -> Path:
    fetches = int(os.environ.get("LOCAL_RANK", distributed.rank())) == 0
    found = hub.resolve(named) if fetches else None  # a mistake in the name shows before processes wait for each other
    folder = None
    try:
        join()
        commit = distributed.gather_json(None if found is None else found.revision)[0]
        pinned = hub.HubModel(named.repo, commit)
        with distributed.raise_on_all_ranks(f"fetching {named}"):
            if fetches:
                folder = _fetched(pinned)
    except RuntimeError as error:
        if fetches:
            raise
        raise CheckpointError(
            f"{named}: rank {distributed.rank()} waited in vain for the first process of this machine to fetch it "
            f"({first_line(error)}); raise training.ddp_timeout, or fetch it before: coordexp model info {named}"
        ) from error
    folder = folder or hub.cached(pinned)
    if folder is None:
        raise CheckpointError(
            f"{pinned}: not in the cache of rank {distributed.rank()}, although the first process of this machine "
            "fetched it; set HF_HOME to the same folder in all processes"
        )
    return folder

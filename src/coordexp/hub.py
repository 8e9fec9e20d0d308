"""Models of the Hugging Face hub: ``OWNER/NAME``, or ``OWNER/NAME@REVISION``. Whether a text is a folder or such a name
is decided here. Only safetensors, configuration, tokenizer and processor are fetched: no pickle, no code.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordexp.errors import CheckpointError

logger = logging.getLogger("coordexp")

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_LONGEST = 96  # characters of OWNER/NAME, by the hub's own rule
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO = "models--"  # the cache's folder of a model: models--OWNER--NAME/snapshots/COMMIT
_WEIGHTS = ".safetensors"
# Files below 1 MB mostly, by which a checkpoint of another kind is refused before its weights are fetched.
_SMALL = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "coordexp.json"),
    *("adapter_config.json", "coord_offset.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """``repo``: ``OWNER/NAME``; ``revision``: branch, tag or commit, None for the newest of the main branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def hub_model(model: str | Path) -> HubModel | None:
    """The model of the hub that ``model`` names; None if it is, or would be, a folder here.

    A folder that exists always wins. ``OWNER/NAME`` is a folder with a typing mistake if ``OWNER`` exists here;
    ``OWNER/NAME@REVISION`` is not. A snapshot in another machine's cache means the same model and commit here. Raises
    CheckpointError for a path that cannot be looked up: too long a name, a locked folder.
    """
    path = Path(model)
    try:
        if path.exists():
            return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; name a folder, or OWNER/NAME") from error
    if (snapshot := _of_snapshot(path)) is not None:
        return snapshot
    found = _NAME.fullmatch(str(path))
    if found is None or "--" in found["repo"] or ".." in found["repo"] or found["repo"].endswith((".git", ".")):
        return None
    if len(found["repo"]) > _LONGEST:
        return None
    if found["revision"] is None and Path(found["repo"]).parent.exists():
        return None
    return HubModel(found["repo"], found["revision"])


def name_of(folder: str | Path) -> str | None:
    """``OWNER/NAME@COMMIT`` of a folder in the hub's cache; None for any other one."""
    snapshot = _of_snapshot(Path(folder))
    return None if snapshot is None else str(snapshot)


def no_such_folder(model: str | Path) -> str:
    """Why ``model`` is not a checkpoint: neither a folder nor a name of the hub."""
    path = Path(model)
    if path.exists():
        return "is a file, not a folder"
    text = str(path)
    if "@" not in text and hub_model(f"{text}@main") is not None:
        return f"no such folder in {path.parent}; for the model of the hub of this name write {text}@main"
    return "no such folder; name a checkpoint, such as a run's output_dir, or a model of the hub: OWNER/NAME"


def resolve(model: HubModel) -> HubModel:
    """``model`` at a commit: the one that its revision means now, or, if the hub is not reached, meant when it was
    fetched last, which is logged. Raises CheckpointError, in seconds: no such model or revision, no access to it, or
    nothing is known of it without the hub."""
    if model.is_pinned:
        return model
    hub: Any = _library()
    with _errors_of(model):
        if hub.constants.is_offline_mode():
            return _as_cached(hub, model, f"HF_HUB_OFFLINE is set{_OR_FETCH}")
        try:
            return replace(model, revision=_ask(hub, model))
        except (hub.errors.HfHubHTTPError, _httpx().TransportError, _NotAHubError) as error:
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if status < 500 and status not in _OF_THE_WAY:
                raise
            known = _as_cached(hub, model, _unreachable(hub, error))
            logger.warning("%s: %s; taking %s, as it was fetched last", model, _unreachable(hub, error), known)
            return known


def cached(model: HubModel) -> Path | None:
    """The folder of ``model`` in the hub's cache, if all its files are there. Makes no connection. Raises
    CheckpointError for a file that is shorter or longer than the hub said."""
    hub: Any = _library()
    if not model.is_pinned:
        try:
            model = _as_cached(hub, model, "")
        except CheckpointError:
            return None
    folder = _snapshot(hub, model)
    files = _files(hub, model)
    if files is None:  # another program fetched it; readers notice missing files
        return folder if hub.constants.is_offline_mode() and folder.is_dir() else None
    present = [(folder / name, size) for name, size in files if (folder / name).exists()]
    for file, size in present:  # the library looks at names only
        if size and file.stat().st_size != size:
            raise CheckpointError(
                f"{model}: {file} has {file.stat().st_size} bytes, not {size} as on the hub; delete {file.resolve()} "
                "and start again where there is a network, which fetches it"
            )
    return folder if files and len(present) == len(files) else None


def fetch(model: HubModel, check: Callable[[Path], object]) -> Path:
    """The folder of ``model``, which is pinned, in the hub's cache; missing files are fetched, with a progress bar.
    ``check``: is called with the folder before weights are fetched, and raises if it is not worth it. Raises
    CheckpointError."""
    if (folder := cached(model)) is not None:
        logger.warning("model: %s, in %s", model, folder)
        return folder
    hub: Any = _library()
    with _errors_of(model):
        if hub.constants.is_offline_mode():
            raise CheckpointError(f"{model}: not whole in {_cache(hub)}, and HF_HUB_OFFLINE is set{_OR_FETCH}")
        _ask(hub, model)  # the library's own calls have no time limit
        folder = _download(hub, model, _SMALL)
        check(folder)
        files = dict(_files(hub, model) or ())
        weights = {name: size for name, size in files.items() if name.endswith(_WEIGHTS)}
        if not weights:
            raise CheckpointError(
                f"{model}: has no *{_WEIGHTS} on {hub.constants.ENDPOINT}; pickled weights (.bin, .pt) are not read, "
                "because they can run code: name another model, or save this one with transformers' save_pretrained"
            )
        size = sum(size for name, size in files.items() if not (folder / name).exists())
        free = shutil.disk_usage(folder).free
        if size > free:
            raise CheckpointError(
                f"{model}: needs {size / 1e9:.1f} GB in {_cache(hub)}, which has {free / 1e9:.1f} GB; free some space, "
                "or set HF_HOME to a folder with more"
            )
        logger.warning("model: %s, fetching %.1f MB into %s", model, size / 1e6, folder)
        return _download(hub, model, tuple(files))


_OF_THE_WAY = (407, 408, 429)  # a proxy's refusal, a timeout, too many requests: nothing about the model
_OR_FETCH = "; unset it, or fetch the model where there is a network (hf download OWNER/NAME) and copy the cache"


def _of_snapshot(path: Path) -> HubModel | None:
    parts = path.absolute().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not _COMMIT.fullmatch(parts[-1]):
        return None
    kind, _, repo = parts[-3].partition(_REPO)
    return None if kind or repo.count("--") != 1 else HubModel(repo.replace("--", "/"), parts[-1])


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ValueError as error:  # it takes HF_ENDPOINT apart
        raise CheckpointError(f"HF_ENDPOINT={os.environ.get('HF_ENDPOINT')}: {error}; correct it") from error
    return huggingface_hub


def _httpx() -> Any:
    import httpx

    return httpx


def _cache(hub: Any) -> Path:
    return Path(hub.constants.HF_HUB_CACHE).expanduser().resolve()


def _snapshot(hub: Any, model: HubModel) -> Path:
    return _cache(hub) / f"{_REPO}{model.repo.replace('/', '--')}" / "snapshots" / str(model.revision)


class _NotAHubError(Exception):
    """The answer is not a hub's, or no request can be made."""


@contextmanager
def _hub_answers() -> Iterator[None]:
    """The library takes a hub's answers and sound settings for granted: the page of a network that asks to log in, a
    proxy without a scheme or a token of other characters end in any of these errors."""
    wrong = (ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError, _httpx().InvalidURL)
    try:
        yield
    except wrong as error:
        reason = "HF_TOKEN is not ASCII" if isinstance(error, UnicodeEncodeError) else f"no answer of a hub: {error}"
        raise _NotAHubError(reason) from error
    except OSError as error:  # httpx names no file; those of the cache have one, or are there
        if isinstance(error, ssl.SSLError) or (type(error) is FileNotFoundError and error.filename is None):
            raise _NotAHubError(f"certificates of SSL_CERT_FILE or SSL_CERT_DIR: {error.strerror or error}") from error
        raise


def _ask(hub: Any, model: HubModel) -> str:
    """The commit that ``model`` means; the cache remembers it."""
    api = hub.HfApi()
    limit_s = hub.constants.HF_HUB_ETAG_TIMEOUT  # 10, or what the user sets; resolve_revision has none
    with _hub_answers():
        api.model_info(model.repo, revision=model.revision, timeout=limit_s)
        return api.resolve_revision(model.repo, revision=model.revision).resolved


def _as_cached(hub: Any, model: HubModel, why: str) -> HubModel:
    try:
        known = hub.HfApi().resolve_revision(model.repo, revision=model.revision, local_files_only=True)
    except hub.errors.RevisionResolutionError as error:
        raise CheckpointError(f"{model}: no such folder here, and not in {_cache(hub)}: {why}") from error
    return replace(model, revision=known.resolved)


def _files(hub: Any, model: HubModel) -> Sequence[tuple[str, int]] | None:
    """Names and bytes of the files that are fetched, none of them in a folder; None before the hub has listed them."""
    try:
        listed = hub.get_cached_repo_tree(model.repo, revision=model.revision)
    except hub.errors.CachedRepoTreeNotFoundError:
        return None
    return [
        (file.path, int(file.size or 0))
        for file in listed
        if file.path in _SMALL or (file.path.endswith(_WEIGHTS) and "/" not in file.path)
    ]


def _download(hub: Any, model: HubModel, names: Sequence[str]) -> Path:
    with _hub_answers():
        return Path(hub.snapshot_download(model.repo, revision=model.revision, allow_patterns=list(names)))


def _unreachable(hub: Any, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"{hub.constants.ENDPOINT} is not reached ({reason}); check the network, set HTTPS_PROXY or HF_ENDPOINT if "
        "this machine needs it, or name a folder"
    )


@contextmanager
def _errors_of(model: HubModel) -> Iterator[None]:
    """The library's errors as one line with the fix."""
    hub: Any = _library()
    try:
        yield
    except (hub.errors.HfHubHTTPError, _httpx().HTTPError, OSError, _NotAHubError) as error:
        raise CheckpointError(f"{model}: {_problem(hub, model, error)}") from error


def _problem(hub: Any, model: HubModel, error: Exception) -> str:
    errors, home = hub.errors, f"{hub.constants.ENDPOINT}/{model.repo}"
    if isinstance(error, errors.GatedRepoError):  # a kind of the next one
        return f"is gated; accept its terms on {home}, log in (hf auth login, or HF_TOKEN), and start again"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such folder here, and {hub.constants.ENDPOINT} has no model {model.repo}, or does not show it to you; "
            "check the name, or log in: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model has no revision {model.revision}; {home}/commits/main lists its commits"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{_unreachable(hub, error)}; files that were fetched are kept"
    if isinstance(error, OSError) and not isinstance(error, (errors.HfHubHTTPError, errors.OfflineModeIsEnabled)):
        reason = error.strerror or " ".join(str(error).split())
        folder = error.filename or _cache(hub)
        return f"{folder}: {reason}; set HF_HOME to a folder that can be written, or free some space there"
    return _unreachable(hub, error)

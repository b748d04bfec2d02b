"""Handing a folded checkpoint to a hub, with huggingface_hub's own upload."""

from __future__ import annotations

from pathlib import Path


def push(folder: str | Path, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Create the model repository ``repo`` where there is none, and upload ``folder`` to it.

    The endpoint is ``HF_ENDPOINT``'s, the token the one that ``hf auth login`` stored, unless
    given. Returns the address of the commit.

    Raises FileNotFoundError for a folder that holds no folded checkpoint, OSError when the hub
    refuses or cannot be reached; the folder stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from flashnorm_triton.checkpoints.source import RECORD

    folder = Path(folder)
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(f"{folder} holds no folded checkpoint ({RECORD} is missing)")
    api = HfApi(token=token)
    try:
        api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            repo_type="model",
            commit_message="Norm gains folded (FlashNorm)",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"the folded checkpoint is in {folder}, but it could not be pushed to {repo}: {first}"
        ) from error
    return str(commit.commit_url)

"""Manifest: the files of a training state and their sizes, by which one knows that it is whole."""

import json
from importlib.metadata import version
from pathlib import Path
from reprlib import repr as short

from pipeshard.checkpoint.document import is_inside, read_document

FORMAT = 1
MANIFEST = "manifest.json"


def write_manifest(folder: Path, step: int, stages: int) -> None:
    """Of all files that are in the folder now."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    versions = {name: version(name) for name in ("pipeshard", "torch", "transformers", "colossalai")}
    manifest = {"format": FORMAT, "step": step, "stages": stages, "versions": versions, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def flaw(folder: Path) -> str:
    """Why the folder is not a complete training state; "" if it is. Raises nothing, whatever is there."""
    try:
        manifest = read_document(folder / MANIFEST)
        if manifest.get("format") != FORMAT:
            return f"its format is {short(manifest.get('format'))}, not {FORMAT}"
        files = manifest.get("files")
        if not isinstance(files, dict):
            return f"{MANIFEST} lists no files"
        for name, size in files.items():
            if not is_inside(name):
                return f"{MANIFEST} names {short(name)}, which is no file of its folder"
            if type(size) is not int or (folder / name).stat().st_size != size:
                return f"{short(name)} has not the size {short(size)} that {MANIFEST} says"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

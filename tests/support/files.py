"""The files below a folder."""

from pathlib import Path


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """The content of every file, and when it was last written; of a folder its name."""
    paths = {str(path.relative_to(root)): path for path in sorted(root.rglob("*"))}
    return {
        name: (path.read_bytes(), path.lstat().st_mtime_ns) if path.is_file() else (b"", 0)
        for name, path in paths.items()
        if "__pycache__" not in name
    }

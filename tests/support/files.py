"""The state of all files below a folder, for tests that nothing was changed."""

from pathlib import Path


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """By relative path: (content, time of the last write in ns) of a file, (b"", 0) of a folder."""
    paths = {str(path.relative_to(root)): path for path in sorted(root.rglob("*"))}
    return {
        name: (path.read_bytes(), path.lstat().st_mtime_ns) if path.is_file() else (b"", 0)
        for name, path in paths.items()
        if "__pycache__" not in name
    }

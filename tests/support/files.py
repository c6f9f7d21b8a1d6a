"""`tree` reads all files below a folder, so that a test can compare them before and after an action."""

from pathlib import Path


def tree(root: Path) -> dict[str, tuple[bytes, int]]:
    """{relative path: (content, time of the last write in ns)} of files; folders have (b"", 0). Caches are left out."""
    paths = {str(path.relative_to(root)): path for path in sorted(root.rglob("*"))}
    return {
        name: (path.read_bytes(), path.lstat().st_mtime_ns) if path.is_file() else (b"", 0)
        for name, path in paths.items()
        if "__pycache__" not in name
    }

"""Hooks of MkDocs, which calls them while it builds the site: pages may link to files outside docs/, as on GitHub.

Such files join the site at their own paths. A page in docs/ has its path in docs/.
"""

import re
from os.path import normpath, relpath
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^):#\s]+)((?:#[^)\s]*)?\))")  # "](", a relative path, and an anchor with ")"


def targets(source, text):
    """Paths in the repository that a page with this text links to; `source` is the page's own path there."""
    return [normpath(Path(source).parent / link) for _, link, _ in LINK.findall(text)]


def on_files(files, config):
    """MkDocs' files of the site, with all files outside docs/ that its pages link to, directly or by other pages."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + ["CONTRIBUTING.md", "CHANGELOG.md"]
    while waiting:
        source = waiting.pop()
        place = at(source)
        if files.get_file_from_path(place) is None and (ROOT / source).is_file():
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
        elif not source.startswith("docs/"):
            continue
        if source.endswith(".md"):
            paths = targets(source, (ROOT / source).read_text())
            waiting += [page_of(path) for path in paths if not path.startswith(("docs/", ".."))]
    return files


def on_page_markdown(markdown, page, config, files):
    """The Markdown of a page, its links changed from paths in the repository to paths in the site."""
    source = page.file.src_uri if page.file.generated_by else f"docs/{page.file.src_uri}"

    def moved(match):
        target = page_of(normpath(Path(source).parent / match[2]))
        return match[1] + relpath(at(target), Path(at(source)).parent) + match[3]

    return LINK.sub(moved, markdown)


def page_of(path):
    """The index.html or README.md of a folder, which the site shows for the folder; any other path as it is."""
    names = ("index.html", "README.md")
    return next((f"{path}/{name}" for name in names if (ROOT / path / name).is_file()), path)


def at(path):
    """Where a file of the repository stands in the site."""
    return path.removeprefix("docs/")

"""For MkDocs: pages may link to files outside docs/, as on GitHub. Such files join the site, at their own paths."""

import re
from os.path import normpath, relpath
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^):#\s]+)((?:#[^)\s]*)?\))")


def targets(source, text):
    """Paths in the repository that a page links to; `source` is the page's own."""
    return [normpath(Path(source).parent / link) for _, link, _ in LINK.findall(text)]


def on_files(files, config):
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + ["CONTRIBUTING.md", "CHANGELOG.md"]
    while waiting:
        source = waiting.pop()
        place = at(source)
        if files.get_file_from_path(place) is None and (ROOT / source).is_file():
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
        elif not source.startswith("docs/"):
            continue
        if source.endswith(".md"):
            found = targets(source, (ROOT / source).read_text())
            waiting += [page_of(one) for one in found if not one.startswith(("docs/", ".."))]
    return files


def on_page_markdown(markdown, page, config, files):
    source = page.file.src_uri if page.file.generated_by else f"docs/{page.file.src_uri}"

    def moved(match):
        target = page_of(normpath(Path(source).parent / match[2]))
        return match[1] + relpath(at(target), Path(at(source)).parent) + match[3]

    return LINK.sub(moved, markdown)


def page_of(path):
    """A folder is shown by its page."""
    names = ("index.html", "README.md")
    return next((f"{path}/{name}" for name in names if (ROOT / path / name).is_file()), path)


def at(path):
    """Where a file of the repository stands in the site."""
    return path.removeprefix("docs/")

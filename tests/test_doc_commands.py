"""A page's commands run in order, in a clone of their own; the first that fails is found."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "doc_commands"
SERVED = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path in ("/health", "/hello")
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(b"hello from " + __file__.encode() if found else b"no such page")

    def log_message(self, *_):
        pass

def main():
    if sys.argv[1:] == ["version"]:
        print("a version")
    elif sys.argv[1] == "serve" and "broken" not in sys.argv:
        port = int(sys.argv[sys.argv.index("--port") + 1])
        http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    else:
        sys.exit("this cannot be served")
"""
CLOSED = "! (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null"


class Project:
    """A repository with a page and a package that can be served."""

    def __init__(self, at: Path) -> None:
        self.at = at
        (at / "scripts").mkdir(parents=True)
        shutil.copy(SCRIPT, at / "scripts")
        (at / "pyproject.toml").write_text('[project.scripts]\nballast = "served:main"\n')
        (at / "served.py").write_text(SERVED)
        self.page("")
        self._git("init", "--quiet")
        self._git("add", ".")
        self._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "all")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.at, check=True)

    def page(self, text: str) -> None:
        (self.at / "README.md").write_text(text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, self.at / "scripts" / "doc_commands", *arguments]
        return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_what_the_commands_of_a_page_are(project: Project) -> None:
    project.page(
        """# Title

```
one   # a comment

# a comment alone
two 'goes
on' \\
    and on
cat <<END
  three
END
```

```yaml
no: command
```

```console
$ four
what four prints
```

~~~~bash
five
```
~~~~

```python
for six in ():
    pass
```

<!-- doc_commands: skip: needs a GPU -->

```
seven
```

<!-- doc_commands: file: out/eight.yaml -->
```yaml
eight: 8
```

   ```sh
   A=1 .venv/bin/ballast serve nine.yaml
   make serve
   ```
"""
    )
    done = project.run("--list")
    assert done.stdout.splitlines() == [
        "README.md:4: shell: one   # a comment",
        "README.md:7: shell: two 'goes ...",
        "README.md:10: shell: cat <<END ...",
        "README.md:20: shell: four",
        "README.md:25: shell: five",
        "README.md:26: shell: ```",
        "README.md:30: python: for six in (): ...",
        "README.md:37: skip: seven",
        "README.md:42: file: out/eight.yaml: eight: 8",
        "README.md:46: server: A=1 .venv/bin/ballast serve nine.yaml",
        "README.md:47: server: make serve",
    ]


def test_a_page_is_run_in_a_clone_with_its_server_beside_it(project: Project) -> None:
    (project.at / "served.py").write_text(SERVED.replace("a version", "an edited version"))
    project.page(
        f"""
```
export GREETING='good morning'
mkdir made && cd made
```

```
test "$GREETING" = 'good morning' && test "$(basename "$PWD")" = made && cd ..
test "$(.venv/bin/ballast version)" = 'an edited version'
```

<!-- doc_commands: file: fleet.yaml -->
```yaml
models: []
```

## Serve

```
make test     # all
.venv/bin/ballast serve "$(cat fleet.yaml)"   # in the background
```

### Ask

```
curl http://127.0.0.1:8000/hello | grep "$PWD/served.py"
```

```python
import urllib.request
import served
assert served.__file__ in urllib.request.urlopen("http://localhost:8000/hello").read().decode()
```

## Afterwards

```
{CLOSED.format(port=8000).replace("127.0.0.1/8000", f"127.0.0.1/{project.port}")}
```
"""
    )
    venv = Path(sys.prefix)
    arguments = ("--venv", str(venv), "--port", str(project.port), "--skip", "^make (test|check)")
    done = project.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make test     # all\n      skipped: --skip" in done.stdout
    assert "doc_commands: all good" in done.stdout
    assert sorted(p.name for p in project.at.iterdir() if p.name != ".git") == [
        "README.md",
        "pyproject.toml",
        "scripts",
        "served.py",
    ]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("(echo 'out of luck'; exit 3)", "exit status 3"),
        ("curl http://127.0.0.1:8000/nothing", "exit status 22"),
        ("sleep 600", "not done after 1 s"),
        ("make serve", "port {port} is in use"),
    ],
)
def test_the_first_command_that_fails_ends_the_run(
    project: Project, command: str, why: str
) -> None:
    served = f"{sys.executable} -c 'import served; served.main()'"
    (project.at / "ballast").write_text(f'#!/bin/sh\nexec {served[:-1]}\' "$@"\n')
    (project.at / "ballast").chmod(0o755)
    project._git("add", "ballast")
    marked = project.at / "reached"
    project.page(f"```\n./ballast serve\n{command}\ntouch {marked}\n```\n")
    if command == "make serve":
        # In the section of a server that still runs another one takes its place; not so here.
        project.page(f"```\n{command}\ntouch {marked}\n```\n")
        with socket.create_server(("127.0.0.1", project.port)):
            done = project.run("--port", str(project.port), "--limit", "1")
    else:
        done = project.run("--port", str(project.port), "--limit", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert why.format(port=project.port) in done.stdout
    if "luck" in command:
        assert "      | out of luck" in done.stdout
    assert "fails" in done.stderr
    assert not marked.exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", project.port)) != 0


def test_a_server_that_ends_by_itself_is_a_failure(project: Project) -> None:
    project.page("```\n.venv/bin/ballast serve broken\n```\n")
    done = project.run("--venv", sys.prefix, "--port", str(project.port))
    assert done.returncode == 1
    assert "the server ended with exit status 1" in done.stdout
    assert "      | server: this cannot be served" in done.stdout


def test_a_page_without_commands_or_with_an_open_block_is_an_error(project: Project) -> None:
    project.page("Nothing to do.\n")
    assert project.run().returncode == 2
    project.page("```\necho\n")
    done = project.run()
    assert (done.returncode, done.stderr) == (
        2,
        "doc_commands: README.md, line 1: the block has no end\n",
    )


def test_the_commands_of_the_readme_are_found() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True)
    kinds = {line.split(": ")[1] for line in done.stdout.splitlines()}
    assert {"shell", "server", "python"} <= kinds, done.stdout + done.stderr


def test_printed_figures_are_compared_with_what_the_command_prints(project: Project) -> None:
    """In order, whatever draws the table and however wide its columns are."""
    command = (
        "```\nprintf 'preset │ kept\\n──────┼──\\nswap   │ 46.5 %%\\nballoon│ 78.6 %%\\n'\n```\n"
    )
    mark = "<!-- doc_commands: prints -->\n"
    project.page(f"{command}\n{mark}```text\npreset  kept\nswap 46.5 %\nballoon 78.6 %\n```\n")
    assert project.run("--venv", sys.prefix).returncode == 0
    for wrong in ("swap 33.0 %", "balloon 78.6 %\nswap 46.5 %"):
        project.page(f"{command}\n{mark}```text\n{wrong}\n```\n")
        ran = project.run("--venv", sys.prefix)
        assert ran.returncode == 1
        assert "does not print" in ran.stdout

"""Links of README.md, docs/ and benchmarks/ lead somewhere; flags and metrics are the scripts'."""

import re
import shlex

import pytest
from helpers import OTHER_ALGORITHMS, ROOT, diff_of, other_algorithm

import cleanreplay
import dqn_jax
import iql_jax
import per_dqn_jax
import ppo_jax
import pqn_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax

pytestmark = pytest.mark.pages

OF_VALUES = (dqn_jax, per_dqn_jax, r2d2_jax, sac_jax, iql_jax, pqn_jax)
SCRIPTS = {x.__name__: x for x in (*OF_VALUES, ppo_jax, recurrent_ppo_jax)}
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("benchmarks/*.md")]
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def without_blocks(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(text):
    """Those of the headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", without_blocks(PAGES[page])):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def commands(page):
    """Those that start a script or a benchmark, in blocks and in the text."""
    joined = re.sub(r" \\\n +", " ", PAGES[page])
    inside = re.findall(r"```bash\n(.*?)```", joined, re.DOTALL)
    text = without_blocks(joined).replace("\n", " ")
    found = re.findall(r"`([^`]*python [^`]*\.py[^`]*)`", text) + "".join(inside).splitlines()
    return [line.split("python ")[-1] for line in found if re.search(r"python \S+\.py", line)]


def flags_of(script):
    defaults = vars(script.Args()) | vars(script.Run())
    switched_off = [f"no_{name}" for name, default in defaults.items() if isinstance(default, bool)]
    return {f"--{name.replace('_', '-')}" for name in [*defaults, *switched_off]}


def flags_in(source):
    """All flags of a benchmark: those of argparse, and arguments that tyro makes flags."""
    arguments = re.findall(r"^    (\w+): ", source, re.MULTILINE)
    flags = {f"--{name.replace('_', '-')}" for name in arguments}
    return flags | set(re.findall(r'"(--[a-z-]+)"', source))


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_that_exist(page):
    for command in commands(page):
        path, *words = shlex.split(command)
        name = path.removesuffix(".py")
        if "--" in words:  # a benchmark hands those after it on to the scripts
            known = set.intersection(*map(flags_of, SCRIPTS.values()))
            known |= flags_in((ROOT / path).read_text()) | {"--"}
        elif name in SCRIPTS:
            known = flags_of(SCRIPTS[name])
        elif name in OTHER_ALGORITHMS:
            known = flags_of(other_algorithm(name))
        elif (ROOT / path).exists():
            known = flags_in((ROOT / path).read_text())
        else:  # a program of the page
            known = set()
        assert {word for word in words if word.startswith("--")} <= known, command


def flags(text):
    """Those that the tables of a page or a section name."""
    rows = re.findall(r"^\| (`--[a-z-]+`(?:, `--[a-z-]+`)*) \|", text, re.MULTILINE)
    return re.findall(r"--([a-z-]+)", " ".join(rows))


def names_of(settings):
    return sorted(name.replace("_", "-") for name in vars(settings))


def page_of(name):
    """The page of a script. That of PER has only what DQN has not."""
    page = PAGES[f"docs/{name.removesuffix('_jax')}.md"]
    return page + PAGES["docs/dqn.md"] if name == "per_dqn_jax" else page


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_of_flags_are_those_of_the_scripts(name):
    script = SCRIPTS[name]
    assert sorted(flags(page_of(name))) == names_of(script.Args())
    assert sorted(flags(PAGES["docs/runs.md"])) == names_of(script.Run())


def metrics(text, quote):
    return set(re.findall(rf"{quote}((?:charts|losses|eval)/\w+){quote}", text))


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_of_metrics_are_those_of_the_scripts(name):
    logged = metrics((ROOT / f"{name}.py").read_text(), '"')
    logged |= {f"eval/{name}" for name in cleanreplay.experiment.STATISTICS}
    logged |= {"charts/success_rate", "eval/success_rate"}
    logged |= {"eval/normalized"} if hasattr(SCRIPTS[name].Args(), "expert_return") else set()
    own = PAGES[f"docs/{name.removesuffix('_jax')}.md"] + PAGES["docs/runs.md"]

    assert metrics(own, "`") <= logged
    assert logged <= metrics(own + page_of(name), "`")


@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
def test_the_section_of_a_diff_has_its_flags_and_quotes_it(name):
    title = name.removesuffix("_jax").replace("_", "[- ]")
    page = PAGES["docs/other_algorithms.md"]
    (section,) = re.findall(
        rf"^## {title}\n(.*?)^## ", page, re.DOTALL | re.MULTILINE | re.IGNORECASE
    )
    script, original = other_algorithm(name), SCRIPTS[OTHER_ALGORITHMS[name]]

    assert set(flags(section)) == set(names_of(script.Args())) - set(names_of(original.Args()))
    quotes = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    assert quotes
    assert all(quote in diff_of(name).read_text() for quote in quotes)


@pytest.mark.parametrize("block", blocks("docs/walk.md", "python"))
def test_the_walk_quotes_dqn_as_it_is(block):
    assert block in (ROOT / "dqn_jax.py").read_text()

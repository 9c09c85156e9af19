"""Links of README.md, docs/ and benchmarks/ have targets; flags and metrics are the scripts'."""

import re
import shlex

import numpy as np
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
    """Lists the anchors of the headings, as GitHub names them."""
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
    """Lists the commands that start a script or a benchmark, in blocks and in the text."""
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
    """Lists the flags of a benchmark: those of argparse, and arguments that tyro makes flags."""
    arguments = re.findall(r"^    (\w+): ", source, re.MULTILINE)
    flags = {f"--{name.replace('_', '-')}" for name in arguments}
    return flags | set(re.findall(r'"(--[a-z-]+)"', source))


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_that_exist(page):
    for command in commands(page):
        path, *words = shlex.split(command)
        name = path.removesuffix(".py")
        if "--" in words:  # a benchmark passes the flags after it on to the scripts
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
    """Lists the flags in the tables of a page or a section."""
    rows = re.findall(r"^\| (`--[a-z-]+`(?:, `--[a-z-]+`)*) \|", text, re.MULTILINE)
    return re.findall(r"--([a-z-]+)", " ".join(rows))


def names_of(settings):
    return sorted(name.replace("_", "-") for name in vars(settings))


COMMON = PAGES["docs/runs.md"].split("## Flags of several scripts")[1].split("\n## ")[0]
EVERY = PAGES["docs/runs.md"].replace(COMMON, "")
LABELS = {"DQN": "dqn", "PER": "per_dqn", "R2D2": "r2d2", "SAC": "sac", "IQL": "iql", "PQN": "pqn"}
LABELS |= {"PPO": "ppo", "recurrent PPO": "recurrent_ppo"}
LABEL_OF = {f"{script}_jax": label for label, script in LABELS.items()}
WORDS = {"on": True, "True": True, "off": False, "False": False, "none": "", "None": ""}


def own_page(name):
    return PAGES[f"docs/{name.removesuffix('_jax')}.md"]


def value(text):
    """A default as a table has it: a word, numbers, or anything else."""
    if text in WORDS:
        return WORDS[text]
    try:
        return tuple(map(float, text.split()))
    except ValueError:
        return text.strip("`")


def default_for(name, cell):
    """The default of a script in a cell like "1; SAC, IQL 2", in which IQL has 2 and DQN 1."""
    default, *others = cell.split("; ")
    labels = "|".join(LABELS)
    for other in others:
        which, text = re.fullmatch(rf"((?:{labels})(?:, (?:{labels}))*) (.+)", other).groups()
        default = text if LABEL_OF[name] in which.split(", ") else default
    return default


def documented(text, name):
    """The pairs (flag, default) of a script in tables; a third of four cells has the scripts."""
    pairs = []
    for row in re.findall(r"^\| (`--[a-z-]+`.*) \|$", text, re.MULTILINE):
        cells = row.split(" | ")
        names = re.fullmatch(r"`--([a-z-]+)`(?:, `--([a-z-]+)`)*", cells[0])
        if not names:  # of a program, as with `--output FILE`
            continue
        if len(cells) == 4 and cells[2] != "all" and LABEL_OF[name] not in cells[2].split(", "):
            continue
        found = re.findall(r"--([a-z-]+)", cells[0])
        defaults = default_for(name, cells[1]).split(", ")
        pairs += zip(found, map(value, defaults), strict=True)
    return pairs


def defaults_of(settings):
    """The same pairs, of the script itself."""

    def plain(default):
        if default is None or default == () or default != default:  # none, empty, or NaN
            return ""
        if isinstance(default, (bool, str)):
            return default
        return tuple(map(float, np.atleast_1d(default)))

    return [(name.replace("_", "-"), plain(value)) for name, value in vars(settings).items()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_flag_of_an_algorithm_is_in_one_table_with_its_default(name):
    """On the page of the script or in the common table. The page of PER has what DQN's has not."""
    tables = documented(own_page(name), name)
    if name == "per_dqn_jax":
        of_per = dict(tables)
        tables += [pair for pair in documented(own_page("dqn_jax"), name) if pair[0] not in of_per]
    tables += documented(COMMON, name)
    assert sorted(tables, key=str) == sorted(defaults_of(SCRIPTS[name].Args()), key=str)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_flag_of_every_script_is_in_one_table_with_its_default(name):
    defaults = {**dict(defaults_of(SCRIPTS[name].Run())), "exp-name": "name of the script"}
    assert sorted(documented(EVERY, name), key=str) == sorted(defaults.items(), key=str)


def metrics(text, quote):
    return set(re.findall(rf"{quote}((?:charts|losses|eval)/\w+){quote}", text))


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_of_metrics_are_those_of_the_scripts(name):
    logged = metrics((ROOT / f"{name}.py").read_text(), '"')
    logged |= {f"eval/{name}" for name in cleanreplay.experiment.STATISTICS}
    logged |= {"charts/success_rate", "eval/success_rate"}
    logged |= {"eval/normalized"} if hasattr(SCRIPTS[name].Args(), "expert_return") else set()
    own = own_page(name) + PAGES["docs/runs.md"]
    original = {"per_dqn_jax": "dqn_jax", "recurrent_ppo_jax": "ppo_jax"}.get(name, name)

    assert metrics(own, "`") <= logged
    assert logged <= metrics(own + own_page(original), "`")


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

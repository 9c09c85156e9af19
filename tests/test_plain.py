"""The rules that keep the scripts and the modules beside them plain to read."""

import ast
import io
import tokenize

import pytest
from events import ROOT

MARK = "# === common to all scripts ==="
# The most lines of each file.
LINES = {
    "dqn_jax.py": 899,
    "per_dqn_jax.py": 919,
    "ppo_jax.py": 1_040,
    "compiled.py": 310,
    "images.py": 150,
    "buffers.py": 1_211,
    "vault.py": 200,
}
# The most expressions of a line, and the most lines of a function where others are allowed more:
# a factory is a list of its functions.
EXPRESSIONS = {"buffers.py": 6.0}
FACTORIES = {"buffers.py": 60}
# Names that say nothing of what they are.
VAGUE = {"size", "shape", "explore", "view", "see", "now", "one", "learn"}


def read(name):
    source = (ROOT / name).read_text()
    return source, ast.parse(source)


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def code_lines(source, tree):
    """The lines with code: neither blank nor a comment nor part of a docstring."""
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        may_have_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if may_have_docstring and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def names_given(tree):
    """Those of variables, arguments, functions and attributes that the file makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


@pytest.mark.parametrize("name", LINES)
def test_lines(name):
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) <= LINES[name]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", LINES)
def test_a_line_has_few_expressions(name):
    source, tree = read(name)
    expressions = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    assert len(expressions) / len(code_lines(source, tree)) <= EXPRESSIONS.get(name, 5.8)


@pytest.mark.parametrize("name", LINES)
def test_a_line_has_one_idea(name):
    """No `a, b = x, y`, no lambda with a name, no `:=`."""
    for node in ast.walk(read(name)[1]):
        assert not isinstance(node, ast.NamedExpr), node.lineno
        if isinstance(node, ast.Assign):
            is_of_tuples = isinstance(node.targets[0], ast.Tuple)
            assert not (is_of_tuples and isinstance(node.value, ast.Tuple)), node.lineno
            is_name = isinstance(node.targets[0], ast.Name)
            assert not (is_name and isinstance(node.value, ast.Lambda)), node.lineno


@pytest.mark.parametrize("name", LINES)
def test_functions_are_short(name):
    for node in functions(read(name)[1]):
        assert node.end_lineno - node.lineno < FACTORIES.get(name, 45), node.name


@pytest.mark.parametrize("name", sorted(LINES.keys() - {"buffers.py", "vault.py"}))
def test_names_say_what_they_are(name):
    assert not VAGUE & set(names_given(read(name)[1]))


@pytest.mark.parametrize("name", LINES)
def test_public_functions_have_types(name):
    for node in functions(read(name)[1]):
        arguments = [x for x in node.args.args if x.arg != "self"]
        assert all(x.annotation for x in arguments), node.name
        assert node.returns, node.name


def test_the_algorithm_is_whole_within_310_lines():
    lines = (ROOT / "dqn_jax.py").read_text().splitlines()
    assert lines.index(MARK) <= 310


@pytest.mark.parametrize("name", [x for x in LINES if x.endswith("_jax.py")])
def test_the_sketch_of_the_loop_names_functions_that_are_there(name):
    """8 to 12 lines at the top of a script; what stands behind # and what is called is there."""
    _, tree = read(name)
    docstring = ast.get_docstring(tree)
    start = docstring.index("    for each log interval")
    sketch = docstring[start : docstring.index("\n\n", start)]
    assert 8 <= len(sketch.splitlines()) <= 12
    defined = {node.name for node in functions(tree)}
    for line in sketch.splitlines():
        _, _, where = line.partition("# ")
        if where:
            assert where.rsplit(".", 1)[-1] in defined, where
    for called in ("draw_noise", "act", "train_step", "write_metrics", "save", "evaluate_agents"):
        assert called in sketch
        assert called in defined

"""Running the body of a cell magic as IPython runs a cell: names stay, errors show the cell's own lines."""

from __future__ import annotations

import ast
import functools
import re
import types
from typing import Any, NamedTuple

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell


class Step(NamedTuple):
    """One statement of a cell; ``shown`` if it is an expression whose value the cell displays."""

    code: types.CodeType
    shown: bool


def called(shell: InteractiveShell, filename: str) -> str:
    """``"Cell In[3]"`` for the file of a cell; any other name as it is."""
    # Old shells have no such name to give.
    name = getattr(shell.compile, "format_code_name", lambda _: None)(filename)
    return " ".join(name) if name else filename


def compiled(shell: InteractiveShell, magic: str, cell: str) -> list[Step]:
    """The statements of ``cell``, line magics and shell commands in it translated.

    Args:
        shell: Whose compiler to use, so that tracebacks find the source.
        magic: The line above the cell; the first line of the cell is numbered 2.
        cell: The body.

    Raises:
        UsageError: The cell does not compile. Where and why has been shown then.
    """
    # IPython drops blank lines at the top, and with them the line numbers that the user sees.
    blank = re.match(r"(?:[^\S\n]*\n)*", cell)[0].count("\n")
    source = f"# {magic}\n" + "\n" * blank + shell.transform_cell(cell)
    # Not `execution_count`, which IPython counts on before or after a cell, as its version has it.
    name = shell.compile.cache(source, shell.displayhook.prompt_count, raw_code=source)
    try:
        nodes = shell.transform_ast(shell.compile.ast_parse(source, name)).body
        shown = _shown(shell, nodes, source)
        return [Step(_code(shell, node, name, node in shown), node in shown) for node in nodes]
    except SyntaxError as error:
        if "await" in error.msg or "async" in error.msg:
            line = source.splitlines()[error.lineno - 1].strip()
            raise UsageError(
                "Constructors are ordinary calls, so this cell cannot await. "
                f"Move this to a cell before it: {line}"
            ) from None
        shell.showsyntaxerror()
        raise UsageError("Nothing was run: the cell does not compile, see above.") from None


def run(shell: InteractiveShell, steps: list[Step], values: list[Any]) -> None:
    """Run the steps in the user's namespace and add what the cell displays to ``values``.

    Showing reads values, which a recording would take for the constructor's: see :func:`show`.
    """
    try:
        _execute(shell, steps, values)
    except BaseException as error:
        _show_own_lines(shell, error)
        raise


def show(shell: InteractiveShell, values: list[Any]) -> None:
    """Display ``values`` as the output of the cell."""
    for value in values:
        shell.displayhook(value)


def _execute(shell: InteractiveShell, steps: list[Step], values: list[Any]) -> None:
    __tracebackhide__ = True  # for %debug
    for code, shown in steps:
        if shown:
            values.append(eval(code, shell.user_global_ns, shell.user_ns))
        else:
            exec(code, shell.user_global_ns, shell.user_ns)


def _shown(shell: InteractiveShell, nodes: list[ast.stmt], source: str) -> list[ast.stmt]:
    """The expressions that this shell would display."""
    choice = shell.ast_node_interactivity
    if choice == "none" or not nodes:
        return []
    if choice == "last_expr_or_assign" and isinstance(nodes[-1], ast.Assign | ast.AnnAssign | ast.AugAssign):
        target = nodes[-1].targets[-1] if isinstance(nodes[-1], ast.Assign) else nodes[-1].target
        if isinstance(target, ast.Name):
            value = ast.copy_location(ast.Expr(ast.Name(target.id, ast.Load())), nodes[-1])
            nodes.append(ast.fix_missing_locations(value))
    found = [node for node in (nodes if choice == "all" else nodes[-1:]) if isinstance(node, ast.Expr)]
    quiet = found and found[-1] is nodes[-1] and DisplayHook.semicolon_at_end_of_expression(source)
    return found[:-1] if quiet else found


def _code(shell: InteractiveShell, node: ast.stmt, name: str, shown: bool) -> types.CodeType:
    if shown:
        return shell.compile(ast.Expression(node.value), name, "eval")
    return shell.compile(ast.Module([node], []), name, "exec")


def _show_own_lines(shell: InteractiveShell, error: BaseException) -> None:
    """Make IPython show ``error`` as if no magic had been around the cell.

    The frames above the cell are added while the error travels on, so they can only be left out when it is
    shown: IPython asks an exception for a rendering of its own.
    """
    chain: dict[int, BaseException] = {}
    link: BaseException | None = error
    while link is not None and id(link) not in chain:
        chain[id(link)] = link
        # Not by assignment: a frozen dataclass forbids that.
        link.with_traceback(_without_recorder(link.__traceback__))
        link = link.__cause__ or link.__context__
    if not hasattr(error, "_render_traceback_"):
        try:
            error._render_traceback_ = functools.partial(_render, shell, error)
        except (AttributeError, TypeError):
            return  # no place for it: then the frames are shown


def _render(shell: InteractiveShell, error: BaseException) -> list[str]:
    trace = _own_lines(error.__traceback__)
    return shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)


def _without_recorder(trace: types.TracebackType | None) -> types.TracebackType | None:
    """``trace`` without the frames between a call of the user's and the op that it makes."""
    kept: list[types.TracebackType] = []
    ours = False
    for entry in _entries(trace):
        # torch's own wrapper of an op is in the trace only because the recorder calls it.
        by_us = _package(entry) == "metaviz" or (ours and _module(entry) == "torch._ops")
        ours = by_us and not _marks(entry)
        if not ours:
            kept.append(entry)
    return _joined(kept)


def _own_lines(trace: types.TracebackType | None) -> types.TracebackType | None:
    """``trace`` without the frames that ran the cell, but with those of who raised the error once more."""
    entries = _entries(trace)
    start = max((index + 1 for index, entry in enumerate(entries) if _marks(entry)), default=0)
    around = [entry for entry in entries[:start] if _package(entry) not in ("metaviz", "IPython")]
    # The last of them is the cell that holds nothing but the call of this magic.
    return _joined(around[:-1] + entries[start:])


def _marks(entry: types.TracebackType) -> bool:
    return entry.tb_frame.f_code is _execute.__code__


def _package(entry: types.TracebackType) -> str:
    return _module(entry).partition(".")[0]


def _module(entry: types.TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__"))


def _entries(trace: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _joined(entries: list[types.TracebackType]) -> types.TracebackType | None:
    trace = None
    for entry in reversed(entries):
        trace = types.TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace

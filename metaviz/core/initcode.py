"""Code to paste: a ``reset_parameters`` that does for a class what its constructor did.

What the code cannot do it says, and it raises where it would have to: pasted code never leaves garbage in silence.
Names come from a model, so they are only ever written as identifiers or as escaped text.
"""

from __future__ import annotations

import ast
import itertools
import keyword
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import init

from metaviz.core.chaincode import MAX_VALUES, NotUnderstood, chain_code, fill_code, literal, written_out
from metaviz.core.fills import Fill, fill_of
from metaviz.core.reading import ops_of
from metaviz.core.record import recording
from metaviz.core.replay import EagerDraws, plain_torch, replay
from metaviz.core.signature import VALUE_LIMIT, Signature, same, signature
from metaviz.core.tape import Tape, Window, window_of
from metaviz.errors import MetavizError

Entry = tuple[str, Tape | None, Window | None, str]

# torch.nn.init functions that say more than the numbers they come down to.
_BY_NAME = frozenset(
    (
        *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
        *("orthogonal_", "eye_", "dirac_"),
    )
)
# Their numbers are of 32 bits at most, and a try works with as many.
_MAX_TRIED = 2**24
_DEVICE = 'device = next((each.device for each in (*self.parameters(), *self.buffers())), "cpu")'


def reset_method(cls_name: str, entries: Sequence[Entry]) -> str:
    """A ``reset_parameters`` that gives tensors what the constructor gave them, and the line that attaches it.

    Args:
        cls_name: Name of the class.
        entries: For each tensor of a module ``(name, tape, window, kind)``: its name there, where its values come from
            (None where no tape knows), and ``"parameter"``, ``"buffer"`` or ``"attribute"``.

    Returns:
        Python code that needs ``torch`` and the class. It raises NotImplementedError at its end if there are tensors
        that it cannot fill.

    Example:
        >>> origin = origin_of(metaviz.build(torch.nn.LayerNorm, 4).weight)
        >>> print(reset_method("Norm", [("weight", origin.tape, origin.window, "parameter")]))
        def reset_parameters(self):
            torch.nn.init.ones_(self.weight)
        <BLANKLINE>
        Norm.reset_parameters = reset_parameters
    """
    names = (f"x{i}" for i in itertools.count(1))
    body: list[str] = []
    missing: list[str] = []
    drawn: dict[int, Entry] = {}
    for entry in entries:
        try:
            lines = _lines(*entry, names)
            _note_draws(entry, drawn)
        except NotUnderstood as why:
            body.append(f"# {_escaped(entry[0])}: {_escaped(str(why))}")
            missing.append(entry[0])
        else:
            if entry[3] == "attribute" and _DEVICE not in body:
                body.append(_DEVICE)
            body += lines
    if missing:
        message = f"{cls_name}.reset_parameters does not fill: {', '.join(missing)}"
        body.append(f"raise NotImplementedError({message!a})")
    grad = any(not line.startswith(("torch.nn.init.", "#", "raise ", "device = ")) for line in body)
    head = ["@torch.no_grad()"] if grad else []
    head.append("def reset_parameters(self):")
    return "\n".join([*head, *(f"    {line}" for line in body or ["pass"]), "", _attach(cls_name), ""])


def _lines(name: str, tape: Tape | None, window: Window | None, kind: str, names: Iterator[str]) -> list[str]:
    """The statements that fill one tensor.

    Raises:
        NotUnderstood: With what is to be done by hand.
    """
    target = _reference(name, kind)
    if target is None:
        raise NotUnderstood("this place cannot be written as code; fill it by hand")
    if tape is None or window is None:
        raise NotUnderstood("no tape knows where its values come from; fill it by hand")
    if 0 in window.size:
        return []
    # An attribute stays on meta where `to_empty` puts memory under parameters and buffers.
    before = [f"{target} = torch.empty_like({target}, device=device)"] if kind == "attribute" else []
    known = signature(tape, window)
    if tape.unwritten(window):
        raise NotUnderstood(
            "in an ordinary build, too, it is memory that nothing writes; say what it is to hold"
        )
    call = _by_name(tape, window, known)
    if call is not None:
        return [*before, call.replace("\0", target)]
    if len(known.fills) == 1:
        return [*before, fill_code(_as_written(tape, window, known.fills[0]), target, window.dtype)]
    try:
        return [*before, *chain_code(tape, window, target, names)]
    except NotUnderstood:
        if window.numel() <= MAX_VALUES and not known.draws:
            return [*before, f"{target}.copy_({_small(tape, window)})"]
        raise NotUnderstood(f"copy it from the constructor; it has {known.words}") from None


def _note_draws(entry: Entry, drawn: dict[int, Entry]) -> None:
    """Take the random ops that ``entry`` comes from into ``drawn``, by id.

    Raises:
        NotUnderstood: Another tensor comes from one of them, too: drawn apart the two would not belong together.
    """
    _, tape, window, _ = entry
    for op in ops_of(tape, window.storage):
        if op.draw is not None:
            first = drawn.setdefault(id(op), entry)
            if first[2].storage != window.storage:
                raise NotUnderstood(
                    f"it comes from the same draw as {first[0]}; copy how from the constructor"
                )


def _as_written(tape: Tape, window: Window, fill: Fill) -> Fill:
    """``fill`` with the bounds that the constructor named, be they out of reach."""
    op = tape.last_write(window.storage)
    written = fill_of(op) if op is not None and not op.reads else None
    return written if written is not None and written.canonical() == fill else fill


def _by_name(tape: Tape, window: Window, known: Signature) -> str | None:
    """The call of the torch.nn.init function that did it, if with its defaults, or a gain, it does the same again."""
    ops = ops_of(tape, window.storage)
    name = ops[-1].where.init if ops and ops[-1].where else None
    if name not in _BY_NAME or window.numel() > _MAX_TRIED:
        return None
    gains = known.numbers[-1:] if name == "orthogonal_" else ()
    for extra in ({}, *({"gain": gain} for gain in gains)):
        if same(known, _tried(name, window, extra)):
            listed = "".join(f", {key}={literal(value)}" for key, value in extra.items())
            return f"torch.nn.init.{name}(\0{listed})"
    return None


def _tried(name: str, window: Window, extra: dict[str, float]) -> Signature:
    """The signature of a torch.nn.init function on a tensor like ``window``."""
    nothing = Signature(tuple(window.size), window.dtype, False, "")
    try:
        with recording() as rec:
            tensor = torch.empty(tuple(window.size), dtype=window.dtype)
            getattr(init, name)(tensor, **extra)
    except (MetavizError, RuntimeError, ValueError, TypeError):
        return nothing
    return signature(rec.tape, window_of(tensor, rec.tape))


def _small(tape: Tape, window: Window) -> str:
    if tape.nbytes_of(tape.slice([window.storage])) > VALUE_LIMIT or window.dtype.itemsize > 16:
        raise NotUnderstood
    with plain_torch():
        ((_, memory),) = replay(tape, [window.storage], EagerDraws())
        return written_out(window.on(memory).resolve_conj().resolve_neg().clone())


def _attach(cls_name: str) -> str:
    if all(map(_is_name, cls_name.split("."))):
        return f"{cls_name}.reset_parameters = reset_parameters"
    return "type(module).reset_parameters = reset_parameters  # module: any one of this class"


def _reference(name: str, kind: str) -> str | None:
    """The expression for a tensor of ``self``; None where there is none that does nothing but look it up."""
    if kind == "attribute":
        return _looked_up(name)
    *path, last = name.split(".")
    holder = "self"
    for part in path:
        plain = _is_name(part) and not hasattr(nn.Module, part)
        holder += f".{part}" if plain else f"._modules[{part!a}]"
    if _is_name(last) and not hasattr(nn.Module, last):
        return f"{holder}.{last}"
    return f"{holder}.{'_buffers' if kind == 'buffer' else '_parameters'}[{last!a}]"


def _looked_up(name: str) -> str | None:
    """``name`` if it is attributes and constant keys only, such as ``cache['cos'][0]``."""
    try:
        tree = ast.parse(f"self.{name}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    node = tree
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return None
        node = node.value
    code = ast.unparse(tree) if isinstance(node, ast.Name) and node.id == "self" else None
    return code if code is not None and code.isascii() and "\n" not in code else None


def _is_name(text: str) -> bool:
    """Whether ``text`` is an identifier that means the same inside of a class and outside."""
    return (
        text.isascii() and text.isidentifier() and not keyword.iskeyword(text) and not text.startswith("__")
    )


def _escaped(text: str) -> str:
    """``text`` on one line, with nothing in it that cannot be seen."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)

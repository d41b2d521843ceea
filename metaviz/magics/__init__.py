"""The magics: each is one public call and hands back what it answers. ``%load_ext metaviz`` loads them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import display
from traitlets import Bool, Float, TraitError

import metaviz
from metaviz.core import provenance
from metaviz.core.record import VALUE_LIMIT
from metaviz.core.sources import SOURCES
from metaviz.magics import arguments, built, cell, completion, names, status
from metaviz.magics.progress import Progress
from metaviz.views.trouble import TroubleReport

_MODEL = argument("model", help="Name of a model, such as model or trainer.model; no expression.")
_SOURCE = argument(
    "--source",
    choices=SOURCES,
    default="auto",
    help="Where values come from: replay (the tape), reset (init methods), or auto, the first that can.",
)
_CHECKPOINT = argument(
    "--checkpoint",
    metavar="PATH",
    help="Read values from a file or folder, or from what a name is bound to: a path, a state dict, a "
    "metaviz.checkpoint. The name goes before a file that is called so; for that, write ./NAME.",
)
_KEY_MAP = argument(
    "--key-map",
    action="append",
    default=[],
    metavar="OLD=NEW",
    help="Names that begin with OLD in the checkpoint begin with NEW in the model; may be given several times.",
)
_INSIDE = argument(
    "--inside", metavar="NAME", help="Which entry of the file to take, where several hold tensors."
)
_PATHS = argument("path", nargs="*", help="Modules, tensors or globs: layers.1 layers.*.mlp; all if none.")


@magics_class
class MetavizMagics(Magics):
    """The magics of one shell. ``%config MetavizMagics`` shows what can be set."""

    show_trees = Bool(True, help="Show the trees of what a %%meta_build cell built.").tag(config=True)
    progress_after = Float(1.0, min=0.0, help="Seconds of work before its progress shows.").tag(config=True)

    @no_var_expand
    @cell_magic
    @magic_arguments()
    @argument(
        "--value-limit",
        type=arguments.size,
        default=VALUE_LIMIT,
        help="Most bytes to compute where a constructor reads values, such as 256MiB; 64MiB if left out.",
    )
    @argument("--quiet", action="store_true", help="Show neither trees nor a summary.")
    def meta_build(self, line: str, body: str) -> None:
        """Run a cell so that the models in it are built on the meta device, with a tape.

        Constructors run unchanged and nothing is allocated. What the cell binds to names stays.
        """
        options = arguments.read(self.meta_build, line)
        steps = cell.compiled(self.shell, f"%%meta_build {line}".rstrip(), body)
        with contextlib.ExitStack() as stack:
            values: list[Any] = []
            stack.callback(cell.show, self.shell, values)
            meter = stack.enter_context(built.Meter(self.shell.user_ns))
            with arguments.one_line_errors():
                stack.enter_context(metaviz.recording(value_limit=options.value_limit))
            cell.run(self.shell, steps, values)
        for part in () if options.quiet else built.report(meter, self.show_trees):
            (print if isinstance(part, str) else display)(part)

    @no_var_expand
    @line_magic
    @magic_arguments()
    @_MODEL
    @argument("path", nargs="?", default="", help="Module or tensor to start from: layers.1")
    @argument(
        "--depth",
        type=arguments.levels,
        help="How many levels to open; as many as there is room for if none.",
    )
    @_SOURCE
    @_CHECKPOINT
    @_KEY_MAP
    @_INSIDE
    @argument("--blocked", action="store_true", help="Only what is wrong, why, and what to do about it.")
    @argument("--search", action="store_true", help="As --blocked; look for optimizers of the model, too.")
    @argument("--static", action="store_true", help="A picture that needs no kernel, not a widget.")
    def meta_tree(self, line: str) -> metaviz.TreeWidget | metaviz.ModuleTree | TroubleReport:
        """See a model or one of its parts: what is where, and what can be given values.

        Nothing is moved and no value is read. In a notebook it is a widget: open, filter, tick, materialize. Bind it
        to use it: w = %meta_tree model; w.selection, w.plan, w.tree
        """
        options = arguments.read(self.meta_tree, line)
        model = names.resolve(self.shell.user_ns, options.model)
        with arguments.one_line_errors(options.model):
            stored = names.checkpoint(self.shell.user_ns, options)
            seen = metaviz.tree(model, source=options.source, checkpoint=stored)[options.path]
            seen.columns.called = options.model
            if options.blocked or options.search:
                return seen.trouble(search=options.search)
        shown = metaviz.show(seen, depth=options.depth, static=options.static)
        return built.Opened(seen, options.depth) if shown is seen and options.depth is not None else shown

    @no_var_expand
    @line_magic
    @magic_arguments()
    @_MODEL
    @_PATHS
    @argument("--device", help="Where the values shall be: cpu (if left out), cuda:0, auto (all there are).")
    @_SOURCE
    @_CHECKPOINT
    @_KEY_MAP
    @_INSIDE
    @argument(
        "--rng",
        choices=("eager", "keyed", "device"),
        default="eager",
        help="How to draw random numbers, see above.",
    )
    @argument(
        "--dtype",
        type=arguments.floating,
        help="Floating-point dtype to cast to: bfloat16; checkpoint for what is stored.",
    )
    @argument("--skip-blocked", action="store_true", help="Leave on meta what no source can give values.")
    @argument("--dry-run", action="store_true", help="Only say what would be done.")
    @argument("--gradients", action="store_true", help="With --dry-run: the memory that gradients take, too.")
    @argument("--optimizer", metavar="NAME", help="With --dry-run: the memory of an optimizer, too: AdamW.")
    def meta_materialize(self, line: str) -> metaviz.Report | metaviz.Plan:
        """Give parts of a model the values of a checkpoint or of an ordinary build. All or nothing.

        --rng eager: the very numbers of an ordinary CPU build with the same seed. keyed: drawn on the device,
        the same whatever is chosen. device: from the global generator of the device.
        """
        options = arguments.read(self.meta_materialize, line)
        model, paths = names.resolve(self.shell.user_ns, options.model), options.path or ""
        same = {name: getattr(options, name) for name in ("device", "source", "rng", "dtype")}
        with arguments.one_line_errors(options.model):
            same["checkpoint"] = names.checkpoint(self.shell.user_ns, options)
            if options.dry_run:
                plan = metaviz.plan(model, paths, **same)
                if options.gradients or options.optimizer:
                    print(plan.memory(gradients=options.gradients, optimizer=options.optimizer))
                return plan
            blocked = "skip" if options.skip_blocked else "error"
            verb = "" if same["checkpoint"] is None else "read"
            with Progress(self.shell, self.progress_after, verb=verb) as shown:
                done = metaviz.materialize(model, paths, **same, blocked=blocked, progress=shown)
                return shown.finish(done)

    @no_var_expand
    @line_magic
    @magic_arguments()
    @argument(
        "checkpoint",
        metavar="PATH",
        help="A file or folder, or a name bound to a path, a state dict or a metaviz.checkpoint, which goes first.",
    )
    @argument("model", nargs="?", help="Name of a model: how it fits.")
    @_KEY_MAP
    @_INSIDE
    def meta_checkpoint(self, line: str) -> metaviz.Checkpoint | metaviz.Match:
        """See what is in a checkpoint, or with a model what fits, what is missing, and what else is in it.

        Only headers are read, and no code of the file is run.
        """
        options = arguments.read(self.meta_checkpoint, line)
        model = None if options.model is None else names.resolve(self.shell.user_ns, options.model)
        with arguments.one_line_errors(options.model or "model"):
            stored = names.checkpoint(self.shell.user_ns, options)
            if model is None:
                return stored
            return dataclasses.replace(metaviz.match(model, stored), called=options.model)

    @no_var_expand
    @line_magic
    @magic_arguments()
    @_MODEL
    @_PATHS
    @argument("--force", action="store_true", help="Lose what was changed since it was materialized.")
    def meta_unload(self, line: str) -> metaviz.Report:
        """Take parts of a model back to meta and free their memory.

        Materializing them again gives the same values.
        """
        options = arguments.read(self.meta_unload, line)
        model = names.resolve(self.shell.user_ns, options.model)
        with arguments.one_line_errors(options.model):
            return metaviz.unload(model, options.path or "", force=options.force)

    @no_var_expand
    @line_magic
    @magic_arguments()
    @argument(
        "what",
        nargs="*",
        help="A name of a mesh or of what has one (strategy, trainer, model), or a plan: dp=2,tp=4. Looks if left out.",
    )
    @argument(
        "--ranks-per-host", type=int, metavar="N", help="How many ranks a host has; torch does not know."
    )
    @argument("--rank", type=int, metavar="R", help="Of a plan: whose eyes to see it with.")
    @argument("--static", action="store_true", help="A picture that needs no kernel, not a widget.")
    def meta_mesh(self, line: str) -> metaviz.MeshWidget | metaviz.MeshLayout:
        """See a device mesh: one that is there, one that is awaited, or a plan. Nothing is started.

        A mesh that is awaited shows by itself after the cell that makes it.
        """
        options = arguments.read(self.meta_mesh, line)
        with arguments.one_line_errors("model"):
            # A plan may be written with spaces: dp=2, tp=4.
            said = ",".join(part.strip(",") for part in options.what) if options.what else None
            what = names.thing(self.shell.user_ns, said)
            asked = {"ranks_per_host": options.ranks_per_host, "namespace": self.shell.user_ns}
            found = metaviz.mesh(what, rank=options.rank, **asked)
            return metaviz.show(found, static=options.static)

    @no_var_expand
    @line_magic
    @magic_arguments()
    @argument("topic", nargs="?", choices=("help",), help="help: what the magics are for, with examples.")
    def metaviz(self, line: str) -> status.Page:
        """See this session: versions, devices, models and where they are. Nothing is started."""
        options = arguments.read(self.metaviz, line)
        return status.manual() if options.topic else status.status(self.shell.user_ns)


def load(shell: Any) -> None:
    """Give ``shell`` the magics and their completion; once is enough."""
    if "MetavizMagics" in shell.magics_manager.registry:
        return
    try:
        magics = MetavizMagics(shell)
    except TraitError as error:
        # A bad value set by %config stays in the configuration and would keep the magics away for good.
        _forget(shell.configurables)
        shell.config.pop("MetavizMagics", None)
        warnings.warn(f"The settings of MetavizMagics are back to their defaults: {error}", stacklevel=2)
        magics = MetavizMagics(shell)
    shell.register_magics(magics)
    provenance.called = functools.partial(cell.called, shell)
    magics.matcher = completion.matcher(shell, {**magics.magics["line"], **magics.magics["cell"]})
    if magics.matcher is not None:
        shell.Completer.custom_matchers.append(magics.matcher)


def unload(shell: Any) -> None:
    """Take all of it away again."""
    magics = shell.magics_manager.registry.pop("MetavizMagics", None)
    if magics is None:
        return
    # IPython has no call for this. A magic that someone has since replaced stays theirs.
    for table in shell.magics_manager.magics.values():
        for name in [name for name, magic in table.items() if getattr(magic, "__self__", None) is magics]:
            del table[name]
    provenance.called = str
    _forget(shell.configurables)
    if "metaviz.widgets.notebook" in sys.modules:
        sys.modules["metaviz.widgets.notebook"].unhook()
    with contextlib.suppress(ValueError):
        shell.Completer.custom_matchers.remove(magics.matcher)


def _forget(configurables: list[Any]) -> None:
    configurables[:] = [each for each in configurables if not isinstance(each, MetavizMagics)]

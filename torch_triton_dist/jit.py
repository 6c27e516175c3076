"""`torch_triton_dist.jit`: `triton.jit` for functions that use the device language.

    @torch_triton_dist.jit
    def kernel(x, y):
        remote = dl.symm_at(x, (dl.rank() + 1) % dl.num_ranks())      # nobody says ctx=
        ...
    kernel[(1,)](x, y)                                                # in the SHMEM world of `utils`

What such a function calls (`dl.*`, `libshmem_device.*`, other functions under this decorator) takes the context of the group as
`ctx`. The decorator appends a parameter `ctx=None` to the function, and `ctx=ctx` to each of these calls: in the source text that
Triton compiles, line by line what the author wrote. At a launch the host supplies the value, the table of the current SHMEM world;
with NVSHMEM it is None, all calls go to the device library, and the launch links it and initialises the loaded module.

A function that calls nothing of the kind becomes what `triton.jit` makes of it.

Limits: the callee must be a name (`f(...)`, `module.f(...)`) of a global or of an enclosing function. A function that is handed over
as a constexpr argument is not seen: declare `ctx=None` as a parameter and write `ctx=ctx` yourself. Inductor does not know the
parameter: inside torch.compile a launch stays outside of the graph, see docs/language.md.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import io
import re
import sys
import tokenize
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton
from triton.runtime import jit as triton_jit

__all__ = ["JITFunction", "jit"]

_CTX = "ctx"


class JITFunction(triton_jit.JITFunction):  # of the same name: Triton looks at it where it writes functions into cache keys
    """A function that takes the context of the SHMEM world; `kernel[grid](...)` supplies it unless it is passed as `ctx=`."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self._original, self._options, self._settled = fn, options, False
        self.takes_context = False
        super().__init__(fn, **options)
        self._settle(last=False)

    def _settle(self, last: bool = True) -> None:
        """Adds the parameter and the arguments, once all names that the function calls are known: a module may define a function
        below the one that calls it. last: it is about to be compiled, and what is still unknown is for Triton to complain about."""
        if self._settled:
            return
        edits = _Edits(self._original, self._src)
        if edits.unknown and not last:
            return
        self._settled = True
        if not edits.calls:
            return
        source = edits.apply()
        if not edits.has_parameter:
            super().__init__(_with_parameter(self._original), **self._options)
        self._unsafe_update_src(source)
        self.takes_context = True
        self._place = self.arg_names.index(_CTX)

    def parse(self) -> ast.Module:
        self._settle()
        return super().parse()

    @property
    def cache_key(self) -> str:
        self._settle()
        return triton_jit.JITFunction.cache_key.fget(self)

    def __hash__(self) -> int:
        key = self.cache_key
        _keep_out_of_graphs(self)
        return hash(key)

    def _do_compile(self, *args: Any, **kwargs: Any) -> Any:
        if not self.takes_context:
            return super()._do_compile(*args, **kwargs)
        try:
            kernel = super()._do_compile(*args, **kwargs)
        except Exception as error:
            _explain(error, self.__name__)
            raise
        if kernel is not None:
            _worlds().module_hook(kernel)
        return kernel

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """One launch; see `triton.jit`.

        Raises:
            RuntimeError: there is no SHMEM world yet.
            DistributedKernelError: the kernel gave up (on a GPU: at a later call), or an earlier one did.
        """
        if not self._settled:
            self._settle()
        if not self.takes_context:
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        place = self._place
        given = args[place] if len(args) > place else kwargs.get(_CTX)
        if given is None:
            world = _worlds().current(self.__name__)
            context, options = world.before_launch(self.__name__)
            if len(args) > place:
                args = (*args[:place], context, *args[place + 1 :])
            else:
                kwargs[_CTX] = context
            if options:
                kwargs = options | kwargs
        else:
            world = _worlds().of_context(given)
        kernel = super().run(*args, grid=grid, warmup=warmup, **kwargs)
        if world is not None and not warmup:
            world.after_launch()
        return kernel


@functools.cache
def _worlds() -> Any:
    """`utils.world`, which imports torch's distributed package: not before the first launch."""
    from .utils import world

    return world


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit` for a kernel, or a function that kernels call, that uses the device language without passing `ctx`.

    options: those of `triton.jit`. The result is used as that of `triton.jit`.

    Raises:
        ValueError: the function has a variable `ctx` that is not a parameter.
    """
    if fn is None:
        return lambda function: jit(function, **options)
    if triton.knobs.runtime.interpret:
        return triton.jit(fn, **options)
    made = JITFunction(fn, **options)
    return made if made.takes_context or not made._settled else triton.jit(fn, **options)


def _explain(error: Exception, name: str) -> None:
    """Raises another error if the compilation of kernel `name` failed for want of a SHMEM function, or of a library that can be read."""
    unread = re.search(r"Failed to parse library at (\S*shmem\S*)", str(error))
    if unread is not None:
        raise RuntimeError(
            f"kernel {name}: the LLVM of Triton {triton.__version__} cannot read {unread.group(1)}, which a newer one has written. Install "
            "an older nvidia-nvshmem (3.4.5, say; NVSHMEM_LIB_DIR names another folder) or a newer Triton"
        ) from error
    found = re.search(r"[Uu]n(?:resolved extern function|defined symbol:?|defined reference to) [`']?(\w*shmem\w*)", str(error))
    if found is not None:
        raise RuntimeError(
            f"kernel {name} calls {found.group(1)}, which the SHMEM device library does not have: it is too old, or not linked. "
            "Install a newer nvidia-nvshmem (NVSHMEM_LIB_DIR names another folder), and launch the kernel in an NVSHMEM world"
        ) from error


_outside: dict[int, JITFunction] = {}  # by id; kept, so that the id stays theirs


def _keep_out_of_graphs(kernel: JITFunction) -> None:
    """Tells Dynamo, if it is there, to end its graph at a call of this kernel: Inductor would write the source of the kernel into its
    output and call it without `ctx`, which is a new table at each start of the program.

    Called by `__hash__`, because Dynamo hashes an object before it asks whether the object is to stay out, and before it asks whether
    it is a Triton kernel; and to import Dynamo where kernels are made would take longer than to make them."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and id(kernel) not in _outside and kernel.takes_context:
        _outside[id(kernel)] = kernel
        rules._disallowed_callable_ids.add(id(kernel))
        kernel.run = sys.modules["torch._dynamo"].disable(kernel.run, reason="it depends on the SHMEM world")  # type: ignore[method-assign]


def takes_context(callee: Any) -> bool:
    """Whether a call of `callee` in a kernel is to get `ctx`: ours, or the user's under this decorator."""
    if isinstance(callee, JITFunction):
        callee._settle()
        return callee.takes_context
    ours = isinstance(callee, triton_jit.JITFunction) and callee.__module__.split(".")[0] == __name__.split(".")[0]
    return ours and _CTX in callee.arg_names


def _with_parameter(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Python's `inspect` takes for `fn` with one more parameter, `ctx=None`."""
    assert isinstance(fn, types.FunctionType)
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__module__, made.__qualname__, made.__doc__ = fn.__module__, fn.__qualname__, fn.__doc__
    made.__annotations__ = dict(fn.__annotations__)
    signature = inspect.signature(fn)
    parameter = inspect.Parameter(_CTX, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    made.__signature__ = signature.replace(parameters=[*signature.parameters.values(), parameter])  # type: ignore[attr-defined]
    return made


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is below it, but not what stands in f-strings: no device function runs there."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


class _Edits:
    """What the source of a function needs to hand on the context. calls: the calls that get it; unknown: called names that nothing
    is known of yet."""

    def __init__(self, fn: Callable[..., Any], source: str) -> None:
        assert isinstance(fn, types.FunctionType)
        self._source = source
        self._definition = ast.parse(source).body[0]
        assert isinstance(self._definition, ast.FunctionDef)
        arguments = self._definition.args
        parameters = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        self.has_parameter = _CTX in parameters
        self._locals = {node.id for node in ast.walk(self._definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self._locals |= set(parameters)
        self._scope = dict(vars(builtins)) | fn.__globals__
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                self._scope[name] = cell.cell_contents
            except ValueError:  # assigned later
                self._scope.pop(name, None)
        self.unknown: set[str] = set()
        body = [node for statement in self._definition.body for node in _walk(statement)]
        self.calls = [node for node in body if isinstance(node, ast.Call) and self._wants_context(node)]
        if self.calls and not self.has_parameter and _CTX in self._locals:
            raise ValueError(
                f"{fn.__qualname__}: `{_CTX}` is the name under which torch_triton_dist.jit hands on the context of the SHMEM world; "
                "rename the variable, or make it a parameter"
            )

    def _wants_context(self, call: ast.Call) -> bool:
        callee = self._value(call.func)
        if callee is None or not takes_context(callee):
            return False
        return len(call.args) <= callee.arg_names.index(_CTX) and all(keyword.arg != _CTX for keyword in call.keywords)

    def _value(self, node: ast.expr) -> Any:
        """The object that a name or an attribute stands for; None if it is not known at decoration."""
        if isinstance(node, ast.Name):
            if node.id in self._locals:
                return None
            if node.id not in self._scope:
                self.unknown.add(node.id)
            return self._scope.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._value(node.value)
            return None if base is None else getattr(base, node.attr, None)
        return None

    def apply(self) -> str:
        """The source with the parameter and the arguments; every line stays where it is."""
        lines = self._source.splitlines(keepends=True)
        tokens = [
            token
            for token in tokenize.generate_tokens(io.StringIO(self._source).readline)
            if token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        ]
        insertions: list[tuple[int, int, str]] = []  # line, column, text

        def insert(closing: int, text: str) -> None:
            """In front of the token number `closing`, a closing parenthesis."""
            before = tokens[closing - 1].string
            row, column = tokens[closing].start
            insertions.append((row, column, text if before == "(" else f" {text}" if before == "," else f", {text}"))

        places = {token.start: index for index, token in enumerate(tokens)}
        for call in self.calls:
            assert call.end_lineno is not None and call.end_col_offset is not None
            column = len(lines[call.end_lineno - 1].encode()[: call.end_col_offset].decode()) - 1
            insert(places[call.end_lineno, column], f"{_CTX}={_CTX}")
        if not self.has_parameter:
            depth, index = 1, 3  # def name ( ...
            while depth:
                depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(tokens[index].string, 0)
                index += 1
            insert(index - 1, f"{_CTX}=None")
        for row, column, text in sorted(insertions, reverse=True):
            line = lines[row - 1]
            lines[row - 1] = line[:column] + text + line[column:]
        return "".join(lines)

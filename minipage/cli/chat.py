"""``minipage chat``: a conversation on the terminal. Ctrl-C stops the answer, Ctrl-D ends the program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgumentError
from ..interrupts import CatchInterrupt
from .console import show_log
from .options import add_engine_options, add_sampling_options, engine_keywords, sampling_params

if TYPE_CHECKING:
    from ..llm import LLM
    from ..outputs import RequestOutput
    from ..sampling_params import SamplingParams

HELP = """\
/reset  start a new conversation
/help   show this
/exit   end (so does Ctrl-D)
Ctrl-C stops an answer; what was said of it stays in the conversation."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model through its chat template. A line is a message.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message that each conversation begins with")
    add_sampling_options(parser, max_tokens=512, without=("n", "logprobs"))
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model and talk until the input ends."""
    params = sampling_params(args)
    if args.verbose:
        show_log()
    from ..llm import LLM

    with LLM(args.model, **engine_keywords(args)) as llm:
        tokenizer = llm.engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise InvalidArgumentError("this model has no chat template; use `minipage generate`")
        chat = Chat(llm, params, args.system)
        if sys.stdin.isatty():
            note("/help shows the commands")
        for line in read_lines():
            if line in ("/exit", "/quit"):
                break
            chat.take(line)
    return 0


class Chat:
    """One conversation, kept as messages; its output goes to stdout, remarks go to stderr."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._first)

    def take(self, line: str) -> None:
        """Obey a command, or answer a message."""
        if line == "/reset":
            self.messages = list(self._first)
            note("a new conversation")
        elif line == "/help":
            note(HELP)
        elif line.startswith("/"):
            note(f"there is no command {line.split()[0]}; /help shows those that there are")
        elif line:
            self.answer(line)

    def answer(self, text: str) -> None:
        """Ask the model and show its answer as it comes. What was said is kept, also where Ctrl-C cut it short.

        A message that cannot be served, such as one that outgrows the model's length, is reported and forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        said = ""
        try:
            with CatchInterrupt() as ctrl_c:
                for output in self._llm.stream_chat(self.messages, self._params):
                    said = output.outputs[0].text
                    print(output.outputs[0].delta_text, end="", flush=True)
                    if ctrl_c.interrupted:
                        break  # leaving the stream aborts the request
        except ValueError as error:
            note(f"not answered: {error}\n/reset starts a new conversation")
        else:
            print("" if said else "(nothing)")
            if ctrl_c.interrupted:
                note("stopped")
            elif output.outputs[0].finish_reason == "abort":
                note(f"cut off: {output.outputs[0].stop_reason}")
            elif output.outputs[0].finish_reason == "length":
                self._note_length(output)
        if said:
            self.messages.append({"role": "assistant", "content": said})
        else:
            self.messages.pop()

    def _note_length(self, output: RequestOutput) -> None:
        used, most = len(output.prompt_token_ids) + len(output.outputs[0].token_ids), self._llm.info.max_model_len
        if used >= most:
            note(f"the conversation has reached the model's length, {most} tokens; /reset starts a new one")
        else:
            note(f"cut off after --max-tokens {self._params.max_tokens}")


def read_lines() -> Iterator[str]:
    """Stripped lines from the terminal, with editing and history, or from a pipe; until the input ends."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            note("\nCtrl-D or /exit ends")
        except EOFError:
            print()
            return


def note(text: str) -> None:
    """A remark to the user, apart from what the model says."""
    print(text, file=sys.stderr, flush=True)

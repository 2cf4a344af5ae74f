"""What the deciding process tells the others: a decision, that there is none, or what went wrong.

Plain JSON. The config is rebuilt as the kernel's own config class and checked, in the deciding
process too: all of them run with what was sent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..ops.config.decision import Answer, Decision, TierMiss
from ..ops.config.hooks import AgreementError
from ..ops.config.tiers.request import Request
from ..ops.utils.serialize import qualified_name, to_plain


@dataclasses.dataclass(frozen=True)
class Message:
    """What a process published: a decision, a failure, or neither where no tier has a config.

    `misses` are the tiers that had none, each with its reason.
    """

    process: int
    misses: Sequence[Sequence[str]] = ()
    decision: Mapping[str, Any] | None = None
    failure: str | None = None

    @classmethod
    def of(cls, answer: Answer, process: int) -> Message:
        """The message that carries an answer."""
        missed = answer.misses if isinstance(answer, Decision) else answer
        misses = [(miss.tier, miss.reason) for miss in missed]
        if not isinstance(answer, Decision):
            return cls(process, misses)
        try:
            config = to_plain(answer.cfg)
            about = json.loads(json.dumps(_about(answer.about)))
        except TypeError as error:
            raise AgreementError(
                f"the config {answer.cfg!r} of {answer.key} cannot be sent to the other processes: "
                f"{error}"
            ) from error
        decision = {
            "config": config,
            "config_type": qualified_name(type(answer.cfg)),
            "tier": answer.tier,
            "reason": answer.reason,
            "about": about,
        }
        return cls(process, misses, decision)

    @classmethod
    def of_failure(cls, error: BaseException, process: int) -> Message:
        """The message that a process failed to decide."""
        return cls(process, failure=f"{type(error).__name__}: {error}".strip(": "))

    def dumps(self) -> str:
        """The message as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Message:
        """Read what `dumps` wrote."""
        return cls(**json.loads(text))

    def answer(self, request: Request) -> Answer:
        """The answer as this process gives it; an `AgreementError` if it cannot be given here."""
        if self.failure is not None:
            raise AgreementError(
                f"process {self.process} failed to decide the config of {described(request)}: "
                f"{self.failure}; the processes of a job run with the same config, so this one "
                "stops too. Mend it there, or give the config (cfg=, an overlay) in all of them"
            )
        misses = tuple(
            TierMiss(f"{tier} in process {self.process}", reason) for tier, reason in self.misses
        )
        if self.decision is None:
            return misses
        return Decision(
            cfg=self.rebuilt(request),
            tier=self.decision["tier"],
            key=request.key,
            reason=f"agreed: decided by process {self.process}: {self.decision['reason']}",
            misses=misses,
            signature=request.inv.signature,
            about=self.decision["about"],
        )

    def rebuilt(self, request: Request) -> Any:
        """The config of a decision, as a config of this process's kernel."""
        assert self.decision is not None
        plain, type_name = self.decision["config"], self.decision["config_type"]
        try:
            cfg = request.kernel.config_from_plain(plain, type_name)
            origin = f"process {self.process} decided on"
            return request.kernel.check_config(cfg, origin, request.inv)
        except (TypeError, ValueError) as error:
            raise AgreementError(
                f"process {self.process} decided on a config of {described(request)} that this "
                f"process cannot use: {error}; do all processes run the same code?"
            ) from error


def described(request: Request) -> str:
    """The call that a request is about, for a person."""
    return f"{request.key.op_id}({request.inv.signature}), key {request.key.call_key}"


def _about(about: Any) -> dict[str, Any] | None:
    """What is known of a config, short: the trials stay with the process that ran them."""
    if hasattr(about, "about"):  # the outcome of a tuning run
        about = about.about()
    if not isinstance(about, Mapping):
        return None
    return {name: value for name, value in about.items() if name != "trials"}

"""The coordinator's side of a provisioner's answers: who says it, of which machine, and into the log with it."""

import msgspec

from actors.commands import Provisioning, ReportProvision
from events import subjects
from infra.api.messages import DoneAnswer, read_strictly
from infra.api.public_door import PublicDoor
from infra.doors.connection import Connection, Message
from infra.provision.messages import ProvisionReport


class ProvisionDoor:
    """Serves the provisioners of every target. Who answers for a target is the server's to hold: its credential names it."""

    def __init__(
        self, connection: Connection, cluster: str, coordinator: str, provisioning: Provisioning
    ) -> None:
        self._cluster = cluster
        self._coordinator = coordinator
        self._provisioning = provisioning
        self.requests = PublicDoor(
            "provision",
            connection,
            coordinator,
            self._carry_out,
            lambda message: subjects.provisioner_inbox(_target(message)),
        )

    def start(self) -> None:
        """Begin to hear provisioners. Every coordinator hears all of them; who has the duty for the machine answers."""
        self.requests.start(subjects.all_provisions(self._cluster))

    def close(self) -> None:
        """Hear no more. Repeatable."""
        self.requests.close()

    def _carry_out(self, message: Message) -> msgspec.Struct | None:
        said = read_strictly("provision", message.payload, ProvisionReport)
        noted = self._provisioning.provisioned(
            ReportProvision(
                vm=said.agent,
                target=_target(message),
                verdict=said.verdict,
                reference=said.reference,
                detail=said.detail,
                permanent=said.permanent,
            )
        )
        return DoneAnswer(coordinator=self._coordinator) if noted else None


def _target(message: Message) -> str:
    return message.subject.rpartition(".")[2]

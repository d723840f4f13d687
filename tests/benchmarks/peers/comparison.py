"""Rounds of the peers that take turns with ours, and the figures they make: ours beside each peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.benchmarks.figures import Figure, middle, paired, shown
from tests.benchmarks.peers.peer import Peer, Times
from tests.benchmarks.stage import say

RATIO_BELOW = 1.0
"""Ours is to be ahead of them in starting. How long an end takes is mostly how patient one is: shown, no target."""


class Comparison:
    """So many machines at once, by each peer."""

    def __init__(self, peers: Sequence[Peer], count: int) -> None:
        self._peers, self._count = peers, count
        self._times: dict[str, list[Times | None]] = {peer.name: [] for peer in peers}

    def turns(self) -> list[Callable[[], None]]:
        """Return each peer's turn in a round."""
        return [lambda each=peer: self._turn(each) for peer in self._peers]  # type: ignore[misc]

    def figures(self, ours: Sequence[Times]) -> list[Figure]:
        """Return what was measured; a peer that was in trouble has its row too, with the reason."""
        return [
            self._figure(f"{words}, {self._count} at once", peer, part, ours)
            for part, words in enumerate(
                ("asked to all noted as running", "removal asked to all noted as gone")
            )
            for peer in self._peers
        ]

    def _figure(self, name: str, peer: Peer, part: int, ours: Sequence[Times]) -> Figure:
        value, spread = middle([times[part] for times in ours])
        both = [(our[part], their[part]) for our, their in self._pairs(peer, ours)]
        baseline, label = None, f"not measured: {peer.name}: {peer.trouble}"
        if both:
            baseline, (least, most) = middle([their for _, their in both])
            label = f"{peer.name}, {shown(least)}..{shown(most)}"
            if failed := len(ours) - len(both):
                label += f"; {failed} of {len(ours)} rounds failed: {peer.trouble}"
        say(f"microvm: {name}: {value:.1f} ms; {'' if baseline is None else f'{baseline:.1f} ms '}({label})")
        return Figure(
            benchmark="microvm",
            name=name,
            value=value,
            unit="ms",
            spread=spread,
            baseline=baseline,
            baseline_name=label,
            paired_ratio=paired(*zip(*both, strict=True)) if both else None,
            ratio_below=RATIO_BELOW if part == 0 else None,
        )

    def _pairs(self, peer: Peer, ours: Sequence[Times]) -> list[tuple[Times, Times]]:
        rounds = zip(ours, self._times[peer.name], strict=True)
        return [(our, their) for our, their in rounds if their is not None]

    def _turn(self, peer: Peer) -> None:
        self._times[peer.name].append(peer.round(self._count))

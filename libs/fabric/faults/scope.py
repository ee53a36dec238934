"""Where a fault is: everything, a plane, a switch sub-plane, a server, a die, or a pair of dies.

A scope of a server or die reaches what leaves it (`from`), what arrives at it (`to`) or `both`; a
pair, what goes from its first die to its second (`to`), the way back (`from`), or both. Any scope
but that of a plane may be narrowed to one plane.
"""

from __future__ import annotations

from dataclasses import dataclass

from libs.errors import BadInput
from libs.fabric.planes import Plane
from libs.fabric.superpod import UB_SUB_PLANES, SuperPod

#: How many numbers each kind of scope needs.
_NUMBERS = {"everything": 0, "plane": 0, "sub_plane": 1, "server": 1, "die": 1, "pair": 2}
_DIRECTED = ("server", "die", "pair")


@dataclass(frozen=True, slots=True)
class Scope:
    """`numbers` names the sub-plane, server, die or pair; `plane` is empty for all planes."""

    kind: str = "everything"
    numbers: tuple[int, ...] = ()
    plane: str = ""
    direction: str = "both"

    @property
    def has_both_ends(self) -> bool:
        """Whether it is about both dies of every frame in it, not about one it names."""
        return self.kind not in ("server", "die")

    def require(self, pod: SuperPod) -> None:
        """Raise `BadInput` naming the field when there is no such place."""
        wanted = _NUMBERS.get(self.kind)
        if wanted is None:
            raise BadInput(f"scope {self.kind!r}: one of {', '.join(_NUMBERS)}", field="scope.kind")
        if len(self.numbers) != wanted:
            text = f"scope {self.kind} takes {wanted} numbers, not {len(self.numbers)}"
            raise BadInput(text, field="scope.numbers")
        limits = {"sub_plane": UB_SUB_PLANES, "server": pod.num_servers}
        limit = limits.get(self.kind, pod.num_dies)
        for number in self.numbers:
            if not 0 <= number < limit:
                text = f"there is no {self.kind} {number}: the machine has {limit}"
                raise BadInput(text, field="scope.numbers")
        planes = ("", *Plane)
        if self.plane not in planes or (self.kind == "plane" and not self.plane):
            raise BadInput(f"plane {self.plane!r}: one of {', '.join(Plane)}", field="scope.plane")
        if self.kind == "sub_plane" and self.plane not in ("", Plane.UB):
            raise BadInput("only the UB plane has sub-planes", field="scope.plane")
        directions = ("both", "from", "to") if self.kind in _DIRECTED else ("both",)
        if self.direction not in directions:
            text = f"direction {self.direction!r} of a {self.kind}: one of {', '.join(directions)}"
            raise BadInput(text, field="scope.direction")

    def ends_in(self, pod: SuperPod, plane: str, source: int, target: int) -> tuple[int, ...]:
        """The dies of a frame that this scope is about; none when the frame is out of scope."""
        if self.plane and self.plane != plane:
            return ()
        leaves, arrives = self.direction != "to", self.direction != "from"
        match self.kind:
            case "everything" | "plane":
                return source, target
            case "sub_plane":
                hit = plane == Plane.UB and pod.sub_plane_of(source, target) == self.numbers[0]
                return (source, target) if hit else ()
            case "server" | "die":
                place = pod.server_of if self.kind == "server" else int
                ends = (source,) if leaves and place(source) == self.numbers[0] else ()
                return (*ends, target) if arrives and place(target) == self.numbers[0] else ends
            case "pair":
                first, second = self.numbers
                there = arrives and (source, target) == (first, second)
                back = leaves and (source, target) == (second, first)
                return (source, target) if there or back else ()
            case _:
                raise AssertionError(f"scope {self.kind!r} was not checked")

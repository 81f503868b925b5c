"""Which parts of messages the loaded model reads beside text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.errors import FieldPath, UnsupportedParameter
from server.metrics.image_causes import ImageCause

OTHER_MEDIA = {  # what a type's name begins or ends with -> what it is
    "audio": "sound",
    "video": "video",
    "file": "files",
    "document": "documents",
}


@dataclass(frozen=True)
class Readable:
    """What the model of a server reads; its name is for messages."""

    model: str
    images: bool
    refused: Callable[[ImageCause], None] = lambda cause: None  # counts an image
    switched_off: bool = False  # images, by the operator

    def check(self, kind: str, path: FieldPath, *, image: str, text: str) -> None:
        """Raises UnsupportedParameter for a part that the model does not read.

        kind          the part's type, which is not that of a text
        path          of the field that says so
        image, text   the types of the API's parts of images and text
        """
        if self.images and kind == image:
            return
        if self.images:
            media = next((word for mark, word in OTHER_MEDIA.items() if mark in kind), "such parts")
            raise UnsupportedParameter(
                "{} is {}: the model `{}` reads text and images, no {}: send parts of type {} or "
                "{}",
                (path, kind[:40], self.model[:100], media, text, image),
            )
        if kind == image:
            self.refused("model")
        needs = f", {self._needs()}" if kind == image else ""
        raise UnsupportedParameter(
            "{} is {}: the model `{}` reads text only{}: send parts of type {}",
            (path, kind[:40], self.model[:100], needs, text),
        )

    def check_field(self, path: FieldPath) -> None:
        """Raises UnsupportedParameter for a field of images, if the model does not read them."""
        if not self.images:
            self.refused("model")
            raise UnsupportedParameter(
                "{}: the model `{}` reads text only, {}: leave images out",
                (path, self.model[:100], self._needs()),
            )

    def _needs(self) -> str:
        if self.switched_off:
            return "as the operator has switched images off"
        return "and images need a vision-language model"

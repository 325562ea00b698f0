"""Reading the keys of one architecture in a GGUF file, with each fault in one line, and none passed over."""

from __future__ import annotations

from typing import Any

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.gguf_file import GGUFFile

# Keys whose values change what a model computes begin or end so: one that nobody read is refused.
_COMPUTED_PREFIXES = ("attention.", "rope.", "expert", "ssm.", "moe_", "nextn_predict_layers")
_COMPUTED_SUFFIXES = ("_scale", "_softcapping", "_multiplier", "_residual", "full_attention_interval")


class GGUFKeys:
    """The keys `<architecture>.*` of a file.

    Args:
        file: an open file.
        architecture: GGUF's word.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._read: set[str] = set()

    def value(self, key: str, default: Any = None) -> Any:
        """The value as it is, or `default`."""
        self._read.add(key)
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            ConfigurationError: the value is another, or the key is missing and there is no default.
        """
        value = self._present(key, default)
        if type(value) is not int or value <= 0:
            raise self.bad(key, "a whole number above 0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number above 0.

        Raises:
            ConfigurationError: as for `whole`.
        """
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.bad(key, "a number above 0")
        return float(value)

    def only(self, key: str, *values: Any) -> None:
        """Refuse any value but these; a key left out is fine.

        Raises:
            UnsupportedFeatureError: naming key and value.
        """
        value = self.value(key)
        if value is not None and value not in values:
            raise self.unsupported(key, f"only {' or '.join(map(repr, values))}")

    def refuse_unread(self) -> None:
        """Refuse keys that change what the model computes and that nobody asked for. Zero and false turn a thing off.

        Raises:
            UnsupportedFeatureError: naming the first one and its value.
        """
        prefix = f"{self.architecture}."
        for name, value in self.file.metadata.items():
            key = name.removeprefix(prefix)
            if key != name and value and key not in self._read and (key.startswith(_COMPUTED_PREFIXES) or key.endswith(_COMPUTED_SUFFIXES)):
                raise self.unsupported(key, "the key is not known")

    def bad(self, key: str, wanted: str) -> ConfigurationError:
        """The error for a value that can't be."""
        return bad_value(self.file, f"{self.architecture}.{key}", wanted)

    def unsupported(self, key: str, supported: str) -> UnsupportedFeatureError:
        """The error for a value that may be right and that PocketLLM does not compute."""
        name = f"{self.architecture}.{key}"
        return UnsupportedFeatureError(
            f"{self.file.path} has {name} = {_shown(self.file.metadata.get(name))}, which is not supported yet ({supported}): use another model.", param="model"
        )

    def _present(self, key: str, default: Any) -> Any:
        value = self.value(key, default)
        if value is None:
            raise ConfigurationError(f"{self.file.path} lacks the key {self.architecture}.{key}: download or convert it again.", param="model")
        return value


def bad_value(file: GGUFFile, key: str, wanted: str) -> ConfigurationError:
    """The error for a value that can't be, of any key."""
    return ConfigurationError(
        f"{file.path} has {key} = {_shown(file.metadata.get(key))}, which should be {wanted}: download or convert it again.", param="model"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"

"""The operations of a fused model in their order, and where in a program each one stands."""

from __future__ import annotations

from ballast.weights.decoder_recipe import POST, DecoderRecipe


class Order:
    """One program: `embed`, the operations of each layer, `norm`, `head`."""

    def __init__(self, recipe: DecoderRecipe, n_layers: int) -> None:
        normed, lands = recipe.norms != POST, recipe.lands_apart
        self.layer: tuple[str, ...] = (
            *(("input_norm",) if normed else ()),
            "qkv",
            "rotary",
            "attend",
            "o",
            *(("land_o",) if lands else ()),
            *(("post_norm",) if normed else ()),
            "gate_up",
            "down",
            *(("land_down",) if lands else ()),
        )
        """Of a layer. `rotary` writes KV, too. Where operations land, `o` and `down` write beside
        the hidden states, and what they wrote is normed and scaled when it is added."""
        self.n_layers = n_layers

    def __len__(self) -> int:
        return 3 + len(self.layer) * self.n_layers

    def start(self, layer: int) -> int:
        """Of a layer's first operation; of `n_layers`: of the last norm."""
        return 1 + len(self.layer) * layer

    def at(self, layer: int, name: str) -> int:
        """Of one operation of a layer."""
        return self.start(layer) + self.layer.index(name)

    @property
    def last_kv(self) -> int:
        """One past the operation that writes the last layer's KV."""
        return self.at(self.n_layers - 1, "rotary") + 1

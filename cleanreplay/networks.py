"""Turns observations into vectors: convolutions for images, and the numbers beside them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.linear import default_kernel_init
from jax import Array

from cleanreplay.errors import UsageError
from cleanreplay.packed import unpack


def channels_axis(shape: tuple) -> int:
    """Returns the axis of channels of images [..., H, W, C] or [..., C, H, W]: -1 or -3.

    If exactly two neighbours are equal, they are height and width. Otherwise the channels are the
    first axis if it is smaller than the last, and else the last.
    """
    first, middle, last = shape[-3:]
    if (first == middle) != (middle == last):
        return -1 if first == middle else -3
    return -3 if first < last else -1


def channels_last(x: Array) -> Array:
    """Makes [B, H, W, C] of [B, H, W], [B, H, W, C], [B, C, H, W], or of stacks [B, K, ...]."""
    if x.ndim == 3:
        x = x[..., None]
    x = jnp.moveaxis(x, channels_axis(x.shape), -1)
    if x.ndim == 5:  # the frames of a stack become channels
        x = jnp.moveaxis(x, 1, 3)
        x = x.reshape(*x.shape[:3], -1)
    return x


def are_images(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether [B, ...] are images, or stacks of them: uint8 or bool, and large enough.

    With an axis of channels or stacks 5 x 5 pixels are enough, without one 36 x 36.
    """
    if x.dtype not in (jnp.uint8, bool) or x.ndim not in (3, 4, 5):
        return False
    _, height, width, _ = jax.eval_shape(channels_last, x).shape
    return min(height, width) >= (36 if x.ndim == 3 else 5)


# Features, kernel size and stride of the convolutions of large and small images.
LARGE = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
SMALL = [(16, 3, 1)]
PART = 16  # large images whose layers fit into the cache of a CPU


def needs_parts(x: Array) -> bool:
    """Returns whether large images [B, ...] are computed in parts: if they are many, on a CPU."""
    is_known = isinstance(x.shape[0], int)  # not so in jax.export
    return is_known and x.shape[0] > 2 * PART and jax.default_backend() == "cpu"


def in_parts(function: Callable, x: Array) -> Array:
    """Computes function(x) [B, F] of images [B, ...] in equal parts of at most PART images.

    The gradient computes the layers of each part again, which takes less time than to read those of
    all images from memory. Each part has images from all over the batch, which may be split over
    devices.
    """
    batch_size = x.shape[0]
    size = max(n for n in range(1, PART + 1) if batch_size % n == 0)
    parts = x.reshape(size, batch_size // size, *x.shape[1:]).swapaxes(0, 1)
    y = jax.lax.map(jax.checkpoint(function), parts)
    return y.swapaxes(0, 1).reshape(batch_size, -1)


def pure(layer: Callable) -> Callable:
    """Turns a layer of the calling flax module into a function that JAX can transform.

    The layer must have its parameters. Returns other functions as they are.
    """
    if not isinstance(layer, nn.Module):
        return layer
    module, variables = layer.unbind()
    return partial(module.apply, variables)


class Conv(nn.Module):
    """Computes nn.Conv without padding, of images [B, H, W, C], as a product of matrices.

    Its parameters are those of nn.Conv. On a CPU the gradient of XLA's convolution takes 13 times
    as long in a loop (JAX 0.12). `stride` must divide `kernel_size`.
    """

    features: int
    kernel_size: int
    stride: int
    kernel_init: Callable = default_kernel_init

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size, stride, features = self.kernel_size, self.stride, self.features
        kernel_shape = (size, size, x.shape[-1], features)
        kernel = self.param("kernel", self.kernel_init, kernel_shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (features,), jnp.float32)
        # Blocks of stride x stride pixels become the channels of a smaller image.
        height = x.shape[1] // stride
        width = x.shape[2] // stride
        x = x[:, : height * stride, : width * stride]
        x = x.reshape(x.shape[0], height, stride, width, stride, x.shape[-1])
        x = x.swapaxes(2, 3).reshape(x.shape[0], height, width, stride**2 * x.shape[-1])
        # A kernel is `blocks` blocks high and wide. Patches are one block high; one product
        # multiplies them with all rows of the kernel.
        blocks = size // stride
        rows = height - blocks + 1
        columns = width - blocks + 1
        patches = jnp.concatenate([x[:, :, i : i + columns] for i in range(blocks)], axis=-1)
        kernel = kernel.reshape(blocks, stride, blocks, stride, -1, features)
        kernel = kernel.transpose(2, 1, 3, 4, 0, 5).reshape(patches.shape[-1], blocks * features)
        products = (patches @ kernel).reshape(x.shape[0], height, columns, blocks, features)
        # Row i of the kernel belongs to the image i blocks further down.
        return bias + sum(products[:, i : i + rows, :, i] for i in range(blocks))


def cnn(
    x: Array, init: Callable = default_kernel_init, prefix: str = "", layer_norm: bool = False
) -> Array:
    """Makes vectors [B, F] of images, with layers that belong to the calling flax module.

    From 36 x 36 pixels on it is the network of Mnih et al. 2015, extended table 1, and uint8 is
    divided by 255. For smaller images it is that of Young and Tian 2019, arXiv 1903.03176, without
    scaling: their numbers are often flags or kinds of things. `init` initialises the weights. The
    names of layers begin with `prefix`. With `layer_norm` each is normalised over its features.
    """
    _, height, width, _ = jax.eval_shape(channels_last, x).shape
    is_large = min(height, width) >= 36  # which the three convolutions need
    scale = 255 if is_large and x.dtype == jnp.uint8 else 1

    def activation(name: str) -> list[Callable]:
        return [nn.LayerNorm(name=f"{name}_norm"), nn.relu] if layer_norm else [nn.relu]

    def convolve(layers: list[Callable], x: Array) -> Array:
        x = channels_last(x).astype(jnp.float32) / scale
        for layer in layers:
            x = layer(x)
        return as_vectors(x)

    layers: list[Any] = []
    for i, (features, size, stride) in enumerate(LARGE if is_large else SMALL):
        name = f"{prefix}conv_{i}"
        conv = Conv(features, size, stride, kernel_init=init, name=name)
        layers += [conv, *activation(name)]
    if is_large and needs_parts(x) and not layers[0].is_initializing():
        x = in_parts(partial(convolve, [pure(layer) for layer in layers]), x)
    else:
        x = convolve(layers, x)
    name = f"{prefix}conv_out"
    x = nn.Dense(512 if is_large else 128, kernel_init=init, name=name)(x)
    for layer in activation(name):
        x = layer(x)
    return x


def as_vectors(x: Array) -> Array:
    """Flattens [B, ...] to float32 [B, F]. B may be symbolic, as in jax.export."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(jnp.float32)


def example_of(space: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a batch [1, ...] from a Box."""
    return jax.ShapeDtypeStruct((1, *space.shape), space.dtype)


def features_of(
    space: Any, hidden_sizes: tuple, init: Callable | None, layer_norm: bool = False
) -> tuple:
    """Makes `features` for the networks of scripts, and chooses the widths of the layers after it.

    For a Dict of images and numbers, it concatenates the vectors of `cnn` and the numbers.

    Returns:
      A function from observations [B, ...] to vectors [B, F], whose layers belong to the calling
      flax module, and `hidden_sizes`, or () after the convolutions of an image.
    """
    init = init or default_kernel_init
    layout = getattr(space, "layout", ())
    if not layout and not are_images(example_of(space)):
        return as_vectors, hidden_sizes

    def features(x: Array) -> Array:
        if x.dtype != space.dtype:
            raise UsageError("normalize_observations takes no images: the network scales them")
        if not layout:
            return cnn(x, init, layer_norm=layer_norm)
        vectors = [
            cnn(part, init, f"{name}_", layer_norm) if are_images(part) else as_vectors(part)
            for name, part in unpack(x, layout).items()
        ]
        return jnp.concatenate(vectors, axis=-1)

    return features, hidden_sizes if layout else ()

"""Reads images: convolutions, stacks of frames, a check of videos.

A script uses this module if observations are images or no Box, with --frame-stack, and with
--capture-video. A run begins with what `describe` says of its observations.
"""

import math
import os
import warnings
from collections.abc import Callable
from contextlib import closing
from functools import partial
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.linear import default_kernel_init
from gymnasium.spaces import Box, Dict, flatdim, flatten
from gymnasium.vector.utils import batch_space, iterate
from gymnasium.wrappers.vector import FlattenObservation
from jax import Array

from cleanreplay.errors import UsageError
from cleanreplay.packed import Packed, Part, pack, unpack

MAX_NUMBERS = 10_000_000  # of an observation that is flattened


def channels_axis(shape: tuple) -> int:
    """Which axis of images [..., H, W, C] or [..., C, H, W] is channels: -1 or -3.

    Two equal axes are height and width. If all three are equal, or none are, the smaller one of the
    first and the last is channels, and the last if these are equal.
    """
    first, middle, last = shape[-3:]
    if (first == middle) != (middle == last):
        return -1 if first == middle else -3
    return -3 if first < last else -1


def channels_last(x: Array) -> Array:
    """Images [B, H, W], [B, H, W, C], [B, C, H, W], or stacks [B, K, ...] of them: [B, H, W, C]."""
    if x.ndim == 3:
        x = x[..., None]
    x = jnp.moveaxis(x, channels_axis(x.shape), -1)
    if x.ndim == 5:  # the frames of a stack become channels
        x = jnp.moveaxis(x, 1, 3)
        x = x.reshape(*x.shape[:3], -1)
    return x


def are_images(x: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether observations [B, ...] are images, or stacks of them: uint8 or bool, and large enough.

    With an axis of channels, or of a stack, 5 x 5 pixels are enough, else it takes 36 x 36.
    """
    if x.dtype not in (jnp.uint8, bool) or x.ndim not in (3, 4, 5):
        return False
    _, height, width, _ = jax.eval_shape(channels_last, x).shape
    return min(height, width) >= (36 if x.ndim == 3 else 5)


class Conv(nn.Module):
    """nn.Conv without padding, of images [B, H, W, C], as a product of matrices.

    The parameters are those of nn.Conv. On a CPU the gradient of XLA's convolution takes 13 times
    as long in a loop (JAX 0.12). `stride` divides `kernel_size`.
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
        # A kernel is `blocks` of them high and wide. Patches are one block high and meet all of its
        # rows in one product.
        blocks = size // stride
        rows = height - blocks + 1
        columns = width - blocks + 1
        patches = jnp.concatenate([x[:, :, i : i + columns] for i in range(blocks)], axis=-1)
        kernel = kernel.reshape(blocks, stride, blocks, stride, -1, features)
        kernel = kernel.transpose(2, 1, 3, 4, 0, 5).reshape(patches.shape[-1], blocks * features)
        products = (patches @ kernel).reshape(x.shape[0], height, columns, blocks, features)
        # Row i of the kernel belongs to the image i blocks further down.
        return bias + sum(products[:, i : i + rows, :, i] for i in range(blocks))


def cnn(x: Array, init: Callable = default_kernel_init, prefix: str = "") -> Array:
    """Makes vectors [B, F] of images, by layers that belong to the flax module that calls it.

    From 36 x 36 pixels on it is the network of Mnih et al. 2015, extended table 1, and uint8 is
    divided by 255. Smaller images go through that of Young and Tian 2019, arXiv 1903.03176, as they
    are: their numbers are often flags or kinds of things. `init` draws the weights. The names of
    the layers begin with `prefix`.
    """
    is_pixels = x.dtype == jnp.uint8
    x = channels_last(x).astype(jnp.float32)
    layers = [(16, 3, 1)]  # features, kernel size, stride
    width = 128
    if min(x.shape[1:3]) >= 36:  # which the three convolutions need
        x = x / 255 if is_pixels else x
        layers = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        width = 512
    for i, (features, size, stride) in enumerate(layers):
        x = nn.relu(Conv(features, size, stride, kernel_init=init, name=f"{prefix}conv_{i}")(x))
    return nn.relu(nn.Dense(width, kernel_init=init, name=f"{prefix}conv_out")(as_vectors(x)))


def as_vectors(x: Array) -> Array:
    """Flattens [B, ...] to float32 [B, F]. B may be symbolic, as in jax.export."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(jnp.float32)


def features_of(space: Any, hidden_sizes: tuple, init: Callable | None) -> tuple:
    """Makes `features` as the scripts need it, and chooses the widths of the layers after it.

    A Dict of images and numbers has both beside each other: what `cnn` makes of images, and the
    numbers.

    Returns:
      A function from observations [B, ...] to vectors [B, F], whose layers belong to the flax
      module that calls it, and `hidden_sizes`, or () after the convolutions of an image.
    """
    init = init or default_kernel_init
    layout = getattr(space, "layout", ())
    if not layout and not are_images(jax.ShapeDtypeStruct((1, *space.shape), space.dtype)):
        return as_vectors, hidden_sizes

    def features(x: Array) -> Array:
        if x.dtype != space.dtype:
            raise UsageError("normalize_observations takes no images: the network scales them")
        if not layout:
            return cnn(x, init)
        vectors = [
            cnn(part, init, f"{name}_") if are_images(part) else as_vectors(part)
            for name, part in unpack(x, layout).items()
        ]
        return jnp.concatenate(vectors, axis=-1)

    return features, hidden_sizes if layout else ()


class FrameStack(gym.vector.VectorWrapper):
    """Observations [N, K, ...] are the last K of the episode, with zeros from before its start.

    Args:
      envs: vector environment with Box observations, in the autoreset mode NEXT_STEP.
      count: K.
    """

    def __init__(self, envs: gym.vector.VectorEnv, count: int) -> None:
        super().__init__(envs)
        space: Any = envs.single_observation_space
        self.count = count
        # Zeros are among the observations.
        low = np.minimum(space.low, 0)
        high = np.maximum(space.high, 0)
        stack: Any = gym.spaces.Box(
            low=np.stack([low] * count),
            high=np.stack([high] * count),
            dtype=space.dtype,
        )
        if isinstance(space, Packed):
            stack = Packed(space.layout, (count,))
        self.single_observation_space = stack
        self.observation_space = batch_space(stack, envs.num_envs)

    def reset(self, **kwargs: Any) -> tuple:
        """Starts an episode in each environment."""
        frame, info = self.env.reset(**kwargs)
        zeros = np.zeros_like(frame)
        self.older = np.stack([zeros] * (self.count - 1), axis=1)
        self.is_over = np.zeros(len(frame), bool)
        return self.push(frame), info

    def step(self, actions: Any) -> tuple:
        """A step of each environment; after the end of an episode its stack starts anew."""
        frame, reward, terminated, truncated, info = self.env.step(actions)
        stack = self.push(frame)
        self.is_over = np.asarray(terminated | truncated, bool)
        return stack, reward, terminated, truncated, info

    def push(self, frame: np.ndarray) -> np.ndarray:
        """The stacks [N, K, ...] after new frames [N, ...]."""
        older = self.older
        older[self.is_over] = 0
        newest = frame[:, None]
        stack = np.concatenate([older, newest], axis=1)
        self.older = stack[:, 1:].copy()
        return stack


def layout_of(space: gym.Space) -> tuple[Part, ...]:
    """How observations of a Dict are packed: images first. () if no entry is an image."""
    entries = space.spaces if isinstance(space, Dict) else {}
    layout = []
    numbers = {}
    for name, entry in entries.items():
        if isinstance(entry, Box) and are_images(example_of(entry)):
            layout.append(Part(name, entry.shape, np.dtype(entry.dtype).name))
        else:
            numbers[name] = entry
    if not layout:
        return ()
    check_flat(Dict(numbers))
    layout += [Part(name, (flatdim(entry),), "float32") for name, entry in numbers.items()]
    return tuple(layout)


def example_of(space: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a batch [1, ...] from a Box."""
    return jax.ShapeDtypeStruct((1, *space.shape), space.dtype)


class Pack(gym.vector.VectorObservationWrapper):
    """Observations are bytes [N, P], which hold those of a Dict with an image."""

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__(envs)
        self.layout = layout_of(envs.single_observation_space)
        self.single_observation_space = Packed(self.layout)
        self.observation_space = batch_space(self.single_observation_space, envs.num_envs)

    def observations(self, observations: Any) -> np.ndarray:
        """Packs the observations of N environments."""
        parts = {part.name: self.entry(part.name, observations) for part in self.layout}
        return pack(parts, self.layout)

    def entry(self, name: str, observations: Any) -> np.ndarray:
        """An entry [N, ...] of the Dict. If it is no Box, it is flattened."""
        one: Any = self.env.single_observation_space
        all_of_them: Any = self.env.observation_space
        if isinstance(one[name], Box):
            return np.asarray(observations[name])
        rows: Any = iterate(all_of_them[name], observations[name])
        flat: list = [flatten(one[name], row) for row in rows]
        return np.stack(flat)


def wrap(envs: gym.vector.VectorEnv, frame_stack: int) -> gym.vector.VectorEnv:
    """Makes an array of observations that are no Box, and stacks the last frame_stack.

    A Dict with an image is packed, see cleanreplay/packed.py, and all else is flattened.
    """
    if layout_of(envs.single_observation_space):
        envs = Pack(envs)
    elif not isinstance(envs.single_observation_space, Box):
        check_flat(envs.single_observation_space)
        envs = FlattenObservation(envs)
    return FrameStack(envs, frame_stack) if frame_stack > 1 else envs


def before_wrap(envs: gym.vector.VectorEnv) -> Any:
    """The environments that `wrap` was given."""
    while isinstance(envs, FrameStack | FlattenObservation | Pack):
        envs = envs.env
    return envs


def check_flat(space: gym.Space) -> None:
    """Raises UsageError unless observations can be flattened to a vector of moderate size."""
    hint = "a wrapper must choose what the network sees, see docs/environments.md"
    what = f"observations {in_one_line(space)}"
    try:
        size = flatdim(space)
    except (NotImplementedError, ValueError) as error:  # an unknown kind, or of any length
        raise UsageError(f"{what} cannot be flattened to a Box: {hint}") from error
    if size > MAX_NUMBERS:
        limit = f"more than {MAX_NUMBERS:,}"
        raise UsageError(f"{what} would be flattened to {size:,} numbers, {limit}: {hint}")


def describe(envs: gym.vector.VectorEnv) -> str:
    """How the network of a script reads observations that are no vector; "" for vectors."""
    space: Any = envs.single_observation_space
    x = example_of(space)
    if isinstance(space, Packed):
        parts = jax.eval_shape(partial(unpack, layout=space.layout), x)
        seen = [f"{name} of {size_of(x)}" for name, x in parts.items() if are_images(x)]
        numbers = sum(x.size for x in parts.values() if not are_images(x))
        return f"observations are a Dict of images ({', '.join(seen)}) and {numbers:,} numbers"
    if are_images(x):
        return f"observations are images of {size_of(x)}"
    given = before_wrap(envs)
    what = (
        f"stacks of {envs.count} observations" if isinstance(envs, FrameStack) else "observations"
    )
    if given is envs and len(space.shape) == 1:
        return ""
    single = in_one_line(given.single_observation_space)
    return f"{what} {single} are flattened to {np.prod(space.shape, dtype=int):,} numbers"


def size_of(x: Any) -> str:
    """The size of images [B, ...], in words."""
    _, height, width, channels = jax.eval_shape(channels_last, x).shape
    return f"{height} x {width} with {channels} channels"


def in_one_line(space: gym.Space) -> str:
    """A space as Gymnasium writes it, without what is too long for a message."""
    return shorten(str(space), 200, placeholder=" ...")


def check_video(make_envs: Callable, space: gym.Space) -> None:
    """Renders an environment once, so that a run whose video would fail does not begin.

    `make_envs(1, video_folder)` makes one to record. UsageError if there is no screen, no moviepy
    or no way to render it, or if its observations are not those of `space` when it renders.
    """
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame looks for loudspeakers otherwise
    try:
        import moviepy  # noqa: F401  needed when the video is written

        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there may be no frame to save
            with closing(make_envs(1, f"{folder}/video")) as envs:
                if envs.single_observation_space != space:
                    raise ValueError(f"it observes {envs.single_observation_space}, not {space}")
                envs.reset()
                envs.render()
    except ModuleNotFoundError as error:
        raise UsageError(f"capture_video: pip install {error.name}") from error
    except Exception as error:
        text = f"capture_video: cannot record a video: {with_hint(error)}"
        raise UsageError(text) from error


def with_hint(error: Exception) -> str:
    """What an error of rendering says, and what helps in MuJoCo."""
    is_mujoco = any(word in str(error) for word in ("OpenGL", "GLFW", "gladLoadGL"))
    hint = " (MuJoCo without a screen: set MUJOCO_GL=egl or MUJOCO_GL=osmesa)"
    return f"{error}{hint if is_mujoco else ''}"

"""The full key/value store of one layer, on the host or on the device, in position order."""

import torch
from torch import Tensor


class Store:
    """Growing buffers of keys and values [G, S, D].

    Attributes:
        bytes_in, bytes_out: bytes that crossed to and from a store on the host; `read` counts what a selection reads.
    """

    def __init__(self, place: str):
        self.on_host = place == "host"
        self.size, self.bytes_in = 0, 0
        self.bytes_out: Tensor | float = 0.0
        self._keys = self._values = self._projected = None
        self.basis: Tensor | None = None  # see `project`

    def __len__(self) -> int:
        return self.size

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add entries [G, n, D]; their copies on the host carry no gradient."""
        keys, values = keys.detach(), values.detach()
        count = keys.shape[1]
        if self._keys is None:
            self.device = keys.device
            self._keys, self._values = self._buffer(keys, count), self._buffer(values, count)
        if self.size + count > self._keys.shape[1]:
            self._keys, self._values = (self._grown(x, self.size + count) for x in (self._keys, self._values))
        for buffer, new in ((self._keys, keys), (self._values, values)):
            buffer[:, self.size : self.size + count] = new.to(buffer.device)
        if self.basis is not None:
            new = self._in_basis(keys)
            if self.size + count > self._projected.shape[1]:
                self._projected = self._grown(self._projected, self.size + count)
            self._projected[:, self.size : self.size + count] = new
        self.size += count
        if self.on_host:
            self.bytes_in += sum(x.numel() * x.element_size() for x in (keys, values))

    def _buffer(self, like: Tensor, count: int) -> Tensor:
        place = "cpu" if self.on_host else like.device
        pinned = self.on_host and like.is_cuda
        shape = (like.shape[0], count + 256, like.shape[2])
        return torch.empty(shape, dtype=like.dtype, device=place, pin_memory=pinned)

    def _grown(self, buffer: Tensor, needed: int) -> Tensor:
        shape = (buffer.shape[0], max(needed, 2 * buffer.shape[1]), buffer.shape[2])
        bigger = torch.empty(shape, dtype=buffer.dtype, device=buffer.device, pin_memory=buffer.is_pinned())
        bigger[:, : self.size] = buffer[:, : self.size]
        return bigger

    def truncate(self, size: int) -> None:
        """Forget everything from position `size` on."""
        self.size = size

    def project(self, basis: Tensor) -> None:
        """Keep all keys, present and future, in the columns of `basis` [G, D, r] as well, on the device."""
        self.basis = basis
        self._projected = self._in_basis(self._keys[:, : self.size].to(basis.device))

    def _in_basis(self, keys: Tensor) -> Tensor:
        with torch.autocast(keys.device.type, enabled=False):
            return keys.float() @ self.basis

    @property
    def projected(self) -> Tensor:
        """[G, S, r] in fp32: the keys in the projection's columns."""
        return self._projected[:, : self.size]

    def keys(self, size: int | None = None) -> Tensor:
        """The first `size` keys (default: all) on the device. What of it a selection really reads is for `read`."""
        return self._keys[:, : self.size if size is None else size].to(self.device)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at positions [G, F], as [G, F, D] on the device."""
        index = positions.to(self._keys.device)[:, :, None].expand(-1, -1, self._keys.shape[2])
        wide = positions.to(self._values.device)[:, :, None].expand(-1, -1, self._values.shape[2])
        return self._keys.gather(1, index).to(self.device), self._values.gather(1, wide).to(self.device)

    def read(self, vectors: Tensor | float) -> None:
        """Count key and value vectors, per KV head, that a selection moved to the device."""
        if self.on_host:
            size = self._keys.shape[0] * self._keys.shape[2] * self._keys.element_size()
            self.bytes_out = self.bytes_out + vectors * size

    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self._keys, self._values) if x is not None)

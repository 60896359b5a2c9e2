"""A small server: requests come and go, and share every step of a decoder and the pages of its caches.

    python examples/serve.py                            # 24 requests; are the tokens those of one at a time?
    python examples/serve.py --dtype int8 --page-size 32
    python examples/serve.py --requests 200 --slots 32 --no-check

Each step takes the next token of every request that decodes and a chunk of the prompt of those that do not
yet, all in one packed call (`KeyValueCache.append_packed`, `attend_packed`). The pool of pages is smaller
than what all requests need, so some wait until others leave and their pages are free.

The tokens are those of one request at a time, and their scores bit by bit, in any dtype of the cache. That
takes three things:

- attention: a sequence's bits follow from its own rows and keys, not from who else is in the call, nor from
  where its pages lie. This is attn_ext's promise.
- chunks: its own rows do count, so a prompt is cut into the same chunks whoever else is served. A chunk that
  a step has no room for waits for the next one, and is never cut.
- Linear layers: a matrix product may sum in another order for another number of rows. `linear` always takes
  blocks of the same number, and `rows_of_a_block` tries whether the place in a block makes a difference.

The model's weights are random, and so is what it writes. The progress bar needs tqdm:
pip install attn_ext[bench]
"""

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attn_ext

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS = 512, 128, 4, 2, 3
HEAD_DIM = DIM // HEADS
BLOCK = 16  # rows of a matrix product


# The model ----------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Of (T, features) x W^T, in products of `rows` rows each, of which the last are zeros."""
    padded = F.pad(x, (0, 0, 0, -len(x) % rows))
    return torch.cat([block @ weight.T for block in padded.split(rows)])[: len(x)]


def rows_of_a_block(weights: list[Tensor]) -> int:
    """`BLOCK` if a row has the same bits in all of its places, else 1."""
    for weight in weights:
        row = torch.randn(1, weight.shape[1])
        places = linear(row.expand(BLOCK, -1), weight, BLOCK)
        alone = linear(row, weight, BLOCK)
        if not torch.equal(places, alone.expand(BLOCK, -1)):
            return 1
    return BLOCK


@dataclass
class Batch:
    """What a step works on: the rows of some sequences, one after the other."""

    tokens: Tensor  # (T,)
    positions: Tensor  # (T,)
    starts: Tensor  # (N + 1,)
    sequences: Tensor  # (N,), where they are in the caches


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of (T, heads, HEAD_DIM): the two halves are the parts of complex numbers."""
    speed = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = (positions[:, None] * speed)[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Attention of grouped heads over a cache, and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Parameter(torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, DIM) * 2 * DIM**-0.5)
        self.out = nn.Parameter(torch.randn(DIM, DIM) * DIM**-0.5)
        self.up = nn.Parameter(torch.randn(4 * DIM, DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(DIM, 4 * DIM) * (4 * DIM) ** -0.5)

    def forward(self, x: Tensor, batch: Batch, cache: attn_ext.KeyValueCache, rows: int) -> Tensor:
        heads = linear(self.norm1(x), self.qkv, rows).unflatten(-1, (-1, HEAD_DIM))
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        query, key = rotate(query, batch.positions), rotate(key, batch.positions)
        cache.append_packed(key, value, batch.starts, batch.sequences)
        output = cache.attend_packed(query, batch.starts, batch.sequences, enable_gqa=True)
        x = x + linear(output.flatten(1), self.out, rows)
        return x + linear(F.gelu(linear(self.norm2(x), self.up, rows)), self.down, rows)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, DIM))
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Parameter(torch.randn(VOCABULARY, DIM))
        self.rows = rows_of_a_block([p.detach() for p in self.parameters() if p.dim() == 2])

    def forward(self, batch: Batch, caches: list[attn_ext.KeyValueCache]) -> tuple[Tensor, Tensor]:
        """The score of the likeliest token after each sequence, and which that is: (N,) and (N,)."""
        x = self.embedding[batch.tokens]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, batch, cache, self.rows)
        last = x[batch.starts[1:] - 1]
        return linear(self.norm(last), self.head, self.rows).max(-1)


# The server ---------------------------------------------------------------------------------------


@dataclass
class Request:
    prompt: list[int]
    wanted: int  # tokens to write
    arrival: int = 0  # the step from which it is there
    written: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # of what is written
    done: int = 0  # tokens that are in the caches
    place: int = -1  # in the caches

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.wanted - 1  # the last token is not fed in again

    @property
    def decodes(self) -> bool:
        return self.done >= len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.written) == self.wanted

    def next_tokens(self, chunk: int) -> list[int]:
        return self.written[-1:] if self.decodes else self.prompt[self.done : self.done + chunk]


class Server:
    """Runs requests to their end. `rows` is what a step has room for, `pages` what the pool has."""

    def __init__(self, model: Decoder, slots: int, longest: int, options: argparse.Namespace) -> None:
        self.model, self.chunk, self.rows = model, options.chunk, max(options.rows, options.chunk, slots)
        paged = options.page_size is not None
        self.page_rows = options.page_size if paged else longest
        self.pages = options.pages if paged else slots
        dtype = getattr(torch, options.dtype)
        self.caches = [
            attn_ext.KeyValueCache(
                slots, longest, KV_HEADS, HEAD_DIM, page_size=options.page_size, dtype=dtype,
                num_pages=self.pages if paged else None,
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.places = [*range(slots)]
        self.running: list[Request] = []
        self.most_pages, self.steps, self.waited = 0, 0, 0

    def pages_of(self, request: Request) -> int:
        return -(-request.longest // self.page_rows)

    def admit(self, waiting: deque[Request]) -> None:
        """First come, first served: as long as there is a place, and pages for all that it will write."""
        while waiting and waiting[0].arrival <= self.steps:
            free = self.pages - sum(map(self.pages_of, self.running))
            if not self.places or self.pages_of(waiting[0]) > free:
                self.waited += 1
                return
            waiting[0].place = self.places.pop()
            self.running.append(waiting.popleft())

    def choose(self) -> list[Request]:
        """Those that decode, and of the others as many as there is room for."""
        chosen = [request for request in self.running if request.decodes]
        room = self.rows - len(chosen)
        for request in self.running:
            count = 0 if request.decodes else len(request.next_tokens(self.chunk))
            if 0 < count <= room:
                chosen.append(request)
                room -= count
        return chosen

    def step(self, waiting: deque[Request]) -> int:
        """One call of the model. Returns how many tokens it has taken in."""
        self.admit(waiting)
        self.steps += 1
        chosen = self.choose()
        if not chosen:
            return 0
        tokens = [request.next_tokens(self.chunk) for request in chosen]
        lengths = [len(part) for part in tokens]
        batch = Batch(
            torch.tensor([*chain.from_iterable(tokens)]),
            torch.tensor(
                [r.done + i for r, count in zip(chosen, lengths, strict=True) for i in range(count)]
            ),
            torch.tensor([0, *lengths]).cumsum(0),
            torch.tensor([request.place for request in chosen]),
        )
        scores, written = (each.tolist() for each in self.model(batch, self.caches))
        for request, count, score, token in zip(chosen, lengths, scores, written, strict=True):
            request.done += count
            if request.decodes:
                request.written.append(token)
                request.scores.append(score)
        used = self.pages - self.caches[0].free_rows() // self.page_rows
        self.most_pages = max(self.most_pages, used)
        self.release()
        return sum(lengths)

    def release(self) -> None:
        places = [request.place for request in self.running if request.finished]
        for cache in self.caches if places else []:
            cache.reset(torch.tensor(places))
        self.places += places
        self.running = [request for request in self.running if not request.finished]

    def serve(self, requests: list[Request], bar: Any = None) -> None:
        waiting = deque(sorted(requests, key=lambda request: request.arrival))
        while waiting or self.running:
            count = self.step(waiting)
            if bar is not None:
                bar.set_postfix_str(f"{len(self.running)} running", refresh=False)
                bar.update(count)

    def nbytes(self) -> int:
        return sum(cache.nbytes() for cache in self.caches)


# The program --------------------------------------------------------------------------------------


def make_requests(options: argparse.Namespace) -> list[Request]:
    generator = torch.Generator().manual_seed(options.seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    arrival, requests = 0, []
    for _ in range(options.requests):
        length = number(1, options.max_length // 2)
        prompt = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        requests.append(Request(prompt, number(1, options.max_length // 4), arrival))
        arrival += number(0, 4)
    return requests


def progress(total: int, what: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=what, unit="token", disable=None)


def one_at_a_time(model: Decoder, requests: list[Request], options: argparse.Namespace) -> list[Request]:
    """Each alone, its cache one piece of full length."""
    alone = argparse.Namespace(**{**vars(options), "page_size": None})
    copies = [Request(request.prompt, request.wanted) for request in requests]
    bar = progress(sum(request.longest for request in requests), "one at a time")
    for request in copies:
        Server(model, 1, options.max_length, alone).serve([request], bar)
    if bar is not None:
        bar.close()
    return copies


def same(first: Request, second: Request) -> bool:
    """The scores tell more than the tokens: a bit that changes no token changes them."""
    return (first.written, first.scores) == (second.written, second.scores)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24, help="(default: 24)")
    parser.add_argument("--slots", type=int, default=8, help="requests at a time (default: 8)")
    parser.add_argument("--rows", type=int, default=64, help="tokens that a step has room for (default: 64)")
    parser.add_argument("--chunk", type=int, default=24, help="tokens of a prompt at a time (default: 24)")
    parser.add_argument(
        "--max-length", type=int, default=256, help="tokens of a request, at most (default: 256)"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16)")
    parser.add_argument("--pages", type=int, help="of the pool (default: half of what the slots could need)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the caches (default: float32)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True,
        help="serve one request at a time as well, and compare (default)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for name in ("requests", "slots", "rows", "chunk", "page_size", "threads"):
        if getattr(options, name) < 1:
            parser.error(
                f"expected --{name.replace('_', '-')} of at least 1, but got {getattr(options, name)}"
            )
    if options.max_length < 4:
        parser.error(f"expected --max-length of at least 4, but got {options.max_length}")
    full = -(-options.max_length // options.page_size)
    options.pages = max(full, options.slots * full // 2) if options.pages is None else options.pages
    if options.pages < full:
        parser.error(f"expected --pages of at least {full}, what a request can need, but got {options.pages}")
    return options


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model, requests = Decoder(), make_requests(options)

    server = Server(model, options.slots, options.max_length, options)
    bar = progress(sum(request.longest for request in requests), "serving")
    begin = time.perf_counter()
    server.serve(requests, bar)
    seconds = time.perf_counter() - begin
    if bar is not None:
        bar.close()

    read, written = (sum(len(getattr(r, name)) for r in requests) for name in ("prompt", "written"))
    contiguous = server.nbytes() / server.pages * options.slots * options.max_length / options.page_size
    print(f"{len(requests)} requests in {server.steps} steps; requests waited in {server.waited} of them")
    print(f"{read} tokens read, {written} written, {(read + written) / seconds:.0f} tokens/s")
    print(
        f"caches: {server.nbytes() / 1024:.0f} KiB in {server.pages} pages, {server.most_pages} used at "
        f"most; contiguous ones of full length: {contiguous / 1024:.0f} KiB"
    )
    if options.check:
        if not all(map(same, requests, one_at_a_time(model, requests, options))):
            raise SystemExit("tokens or their scores differ from those of one request at a time")
        print("tokens equal: those of one request at a time, and their scores bit by bit")


if __name__ == "__main__":
    main()

"""What memory gives to a kernel that only reads: a bound for decoding, which a copy is not. A copy also writes, and takes turns at it."""

import torch

BOX_BYTES, BOXES = 8192, 5  # bytes of a request, requests of a CTA that are under way
CTAS_PER_SM = 4  # 160 KB under way on an SM: memory needs some 30

#: Bulk copies into shared memory, by one thread of a CTA, each box as soon as its slot is free; nobody looks at them.
SOURCE = """
extern "C" __global__ void read_all(const char* from, long long boxes) {
  __shared__ __align__(128) char slots[BOXES][BOX_BYTES];
  __shared__ unsigned long long landed[BOXES];
  if (threadIdx.x != 0) return;
  const unsigned first_slot = __cvta_generic_to_shared(slots), first = __cvta_generic_to_shared(landed);
  for (int i = 0; i < BOXES; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(first + 8 * i));
  asm volatile("fence.mbarrier_init.release.cluster;");
  const auto await = [&](long long box) {
    asm volatile(
        "{\\n.reg .pred is_done;\\nagain:\\nmbarrier.try_wait.parity.shared::cta.b64 is_done, [%0], %1;\\n@!is_done bra again;\\n}"
        :: "r"(first + 8 * unsigned(box % BOXES)), "r"(unsigned(box / BOXES % 2)) : "memory");
  };
  long long asked = 0;
  for (long long box = blockIdx.x; box < boxes; box += gridDim.x, ++asked) {
    if (asked >= BOXES) await(asked - BOXES);
    const unsigned slot = asked % BOXES, barrier = first + 8 * slot;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(BOX_BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(first_slot + BOX_BYTES * slot), "l"(from + box * BOX_BYTES), "r"(BOX_BYTES), "r"(barrier) : "memory");
  }
  for (long long box = asked < BOXES ? 0 : asked - BOXES; box < asked; ++box) await(box);
}
"""


def reader_of(size: int):
    """A call that reads so many bytes, rounded down to whole boxes, from Hopper on; it returns what it read from."""
    source = SOURCE.replace("BOX_BYTES", str(BOX_BYTES)).replace("BOXES", str(BOXES))
    kernel = torch.cuda._compile_kernel(source, "read_all", compute_capability="90")
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    ctas = CTAS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count

    def read():
        kernel((ctas, 1, 1), (32, 1, 1), (memory, size // BOX_BYTES), stream=torch.cuda.current_stream())
        return memory

    return read

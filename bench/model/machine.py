"""What the cycle model knows of machines: tables of rates, each with its source. Nothing else in it depends on a machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    name: str
    sms: int
    ghz: float  # at most; what load makes of it: clock_of
    product_flops: float  # of bf16, a clock and SM
    shared_bytes: float  # a clock and SM
    memory_tbs: float
    # Clocks of a scheduler (a quarter of an SM) that an instruction of a warp keeps its unit busy, beside products.
    clocks: dict
    # Of a group's turn, beside products and softmax: until whoever waits sees that products are complete, scores are in registers and P
    # is where products read it.
    handover: float
    load: tuple  # what the clock under load follows from: clock_of
    source: str

    def clock_of(self, product_share, exp2_share, is_causal):
        """GHz of calls one behind the other: products and exponentials draw power, by their shares of a step. Of causal calls it is less
        the more products they have; why is not known."""
        at_rest, of_products, of_exp2, of_causal = self.load
        below = of_causal * max(0.0, product_share - 0.71) if is_causal else 0.0
        return min(self.ghz, at_rest - of_products * product_share - of_exp2 * exp2_share - below)


# Measured on an H200 by micro-benchmarks beside a saturated tensor core, which costs other units ports of the register file. Clock:
# fitted to h200.json, whose GPU ran into its power limit at once; after a rest it is 0.23 GHz more; so is the handover. FFMA and FADD differ (1.7, 1.4); sums and arguments are as many of each.
H200 = Machine(
    name="H200", sms=132, ghz=1.98, product_flops=4096, shared_bytes=128, memory_tbs=4.0,
    clocks={"mufu": 10.4, "fma": 1.55, "alu": 3.9, "shuffle": 4.0, "lds": 4.0, "sts": 4.0, "issue": 1.0},
    handover=480, load=(2.298, 0.800, 0.226, 0.26), source="measured")

# Published: FlashAttention-4's paper (products, ex2, shared memory), the CUDA programming guide (issue, fma, alu). Sums of products are in
# tensor memory, not in registers, so units have the rates that they have alone: an assumption. Rates of tensor memory are not published:
# 128 bytes a clock of each scheduler's lanes, an assumption that leaves it far from the bound. The handover is Hopper's. fma2: two a lane, so twice the clocks.
_BLACKWELL = {"mufu": 8.0, "fma": 1.0, "fma2": 2.0, "alu": 2.0, "shuffle": 1.0, "lds": 1.0, "sts": 1.0, "ldtm": 32.0, "sttm": 16.0, "issue": 1.0}
B200 = Machine(
    name="B200", sms=148, ghz=1.85, product_flops=8192, shared_bytes=128, memory_tbs=8.0, clocks=_BLACKWELL, handover=480, load=(1.85, 0.0, 0.0, 0.0),
    source="published; clock nominal")
B300 = Machine(
    name="B300", sms=148, ghz=1.85, product_flops=8192, shared_bytes=128, memory_tbs=8.0, clocks={**_BLACKWELL, "mufu": 4.0}, handover=480, load=(1.85, 0.0, 0.0, 0.0),
    source="published; clock nominal")

MACHINES = {"sm_90a": H200, "sm_100a": B200, "sm_103a": B300}

// A row for each function of device/ptx: a kernel body that calls it and the machine instructions that must come of it.
// Found by looking at what ptxas 13.0 makes; a spelling that a later release changes is changed here. Read
// ptx_wrappers_test.cpp next.
#pragma once

#include <array>
#include <initializer_list>
#include <vector>

namespace fovea::cuda {

struct Wrapper {
  const char* function;
  // the least that has the instruction: 75; 80; 89; 90 (which stands for 90a); 100 (for 100a, and 103a); 103 (for
  // 103a); 120 (for 120a); 75 beside 80: what stands in for it
  int architecture;
  // sees Args a: f, u, i32 (global), map (TensorMap, from 90 on), s (a shared address), n (an int);
  // from 100 on t, a TmemAddress
  const char* body;
  std::vector<const char*> sass;  // all of these stand in the kernel
};

// clang-format off
inline const std::vector<Wrapper> kPtxWrappers = {
    // base.cuh
    {"bit_cast", 80, "a.u[0] = bit_cast<std::uint32_t>(a.f[0]);", {"STG.E"}},
    {"thread_idx", 80, "const Index3 t = thread_idx(); a.i32[0] = t.x; a.i32[1] = t.y; a.i32[2] = t.z;", {"SR_TID.X", "SR_TID.Y", "SR_TID.Z"}},
    {"block_idx", 80, "const Index3 t = block_idx(); a.i32[0] = t.x; a.i32[1] = t.y; a.i32[2] = t.z;", {"SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z"}},
    {"grid_dim", 80, "const Index3 t = grid_dim(); a.i32[0] = t.x; a.i32[1] = t.y; a.i32[2] = t.z;", {"c[0x0][0xc]", "c[0x0][0x10]", "c[0x0][0x14]"}},
    {"block_dim", 80, "const Index3 t = block_dim(); a.i32[0] = t.x; a.i32[1] = t.y; a.i32[2] = t.z;", {"c[0x0][0x0]", "c[0x0][0x4]", "c[0x0][0x8]"}},
    {"lane_idx", 80, "a.i32[0] = lane_idx();", {"SR_LANEID"}},
    {"warp_idx", 80, "a.i32[0] = warp_idx();", {"SHFL.IDX"}},
    {"dynamic_shared", 80, "a.u[0] = dynamic_shared();", {"STG.E"}},
    {"trap", 80, "trap();", {"BPT.TRAP"}},

    // memory.cuh
    {"ld_global", 80, "a.u[0] = ld_global((std::uint8_t*)a.f + 1) + ld_global((std::uint16_t*)a.f + 2) + ld_global(a.u + 2) + sum(ld_global((U32x2*)a.f + 4)) + sum(ld_global((U32x4*)a.f + 8));",
     {"LDG.E.U8 ", "LDG.E.U16 ", "LDG.E R", "LDG.E.64 ", "LDG.E.128 "}},
    {"ld_global_nc", 80, "a.u[0] = ld_global_nc((std::uint8_t*)a.f + 1) + ld_global_nc((std::uint16_t*)a.f + 2) + ld_global_nc(a.u + 2) + sum(ld_global_nc((U32x2*)a.f + 4)) + sum(ld_global_nc((U32x4*)a.f + 8));",
     {"LDG.E.U8.CONSTANT", "LDG.E.U16.CONSTANT", "LDG.E.CONSTANT", "LDG.E.64.CONSTANT", "LDG.E.128.CONSTANT"}},
    {"st_global", 80, "st_global((std::uint8_t*)a.f, std::uint8_t(a.n)); st_global((std::uint16_t*)a.f + 1, std::uint16_t(a.n)); st_global(a.i32 + 1, a.n); st_global((U32x2*)a.f + 1, U32x2{1, s}); st_global((U32x4*)a.f + 1, U32x4{1, s, 3, s});",
     {"STG.E.U8 ", "STG.E.U16 ", "STG.E [", "STG.E.64 ", "STG.E.128 "}},
    {"st_global_cache_hint", 80, "st_global_cache_hint((F32x4*)a.f, {s * 1.F, 0, 0, 0}, CachePolicy::evict_last);", {"STG.E"}},
    {"ld_shared", 80, "a.u[0] = ld_shared<std::uint8_t>(s + 1) + ld_shared<std::uint16_t>(s + 2) + ld_shared<std::uint32_t>(s + 4) + sum(ld_shared<U32x2>(s + 8)) + sum(ld_shared<U32x4>(s + 16));",
     {"LDS.U8 ", "LDS.U16 ", "LDS R", "LDS.64 ", "LDS.128 "}},
    {"st_shared", 80, "st_shared(s, std::uint8_t(a.n)); st_shared(s + 2, std::uint16_t(a.n)); st_shared(s + 4, a.n); st_shared(s + 8, U32x2{1, s}); st_shared(s + 16, U32x4{1, s, 3, s});",
     {"STS.U8 ", "STS.U16 ", "STS [", "STS.64 ", "STS.128 "}},
    {"atom_add_global", 80, "a.i32[1] = atom_add_global(a.i32, a.n);", {"ATOMG.E.ADD.S32.STRONG.GPU"}},
    {"atom_add_acq_rel_global", 80, "a.i32[1] = atom_add_acq_rel_global(a.i32, a.n);", {"MEMBAR", "ATOMG.E.ADD.S32.STRONG.GPU", "CCTL.IVALL"}},
    {"ld_acquire_global", 80, "a.i32[1] = ld_acquire_global(a.i32);", {"LDG.E.STRONG.GPU", "CCTL.IVALL"}},
    {"red_add_release_global", 80, "red_add_release_global(a.i32, a.n);", {"MEMBAR", "RED.E.ADD.S32.STRONG.GPU"}},
    {"atom_exch_shared", 80, "a.u[0] = atom_exch_shared(s, a.u[1]);", {"ATOMS.EXCH"}},
    {"red_add_global", 80, "red_add_global(a.f, 1.5F); red_add_global((std::uint64_t*)a.f + 1, a.n);", {"RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "RED.E.ADD.64.STRONG.GPU"}},
    {"red_or_global", 80, "red_or_global(a.u, s);", {"RED.E.OR.STRONG.GPU"}},
    {"red_max_global", 80, "red_max_global(a.u, s);", {"RED.E.MAX.STRONG.GPU"}},
    {"fence_acq_rel_gpu", 80, "fence_acq_rel_gpu();", {"MEMBAR"}},
    {"prefetch_global_l2", 80, "prefetch_global_l2(a.f);", {"CCTL.E.PF2"}},

    // math.cuh
    {"ex2_approx_ftz", 80, "a.f[0] = ex2_approx_ftz(a.f[1]);", {"MUFU.EX2"}},
    {"lg2_approx_ftz", 80, "a.f[0] = lg2_approx_ftz(a.f[1]);", {"MUFU.LG2"}},
    {"rcp_approx_ftz", 80, "a.f[0] = rcp_approx_ftz(a.f[1]);", {"MUFU.RCP"}},
    {"tanh_approx", 80, "a.f[0] = tanh_approx(a.f[1]);", {"MUFU.TANH"}},
    {"fma_rn_ftz", 80, "a.f[0] = fma_rn_ftz(a.f[1], a.f[2], a.f[3]);", {"FFMA.FTZ"}},
    {"fma_rn", 80, "a.f[0] = fma_rn(a.f[1], a.f[2], a.f[3]);", {"FFMA R"}},
    {"add_rn", 80, "a.f[0] = add_rn(mul_rn(a.f[1], a.f[2]), a.f[3]);", {"FADD R", "FMUL R"}},
    {"mul_rn", 80, "a.f[0] = mul_rn(a.f[1], a.f[2]);", {"FMUL R"}},
    {"div_rn", 80, "a.f[0] = div_rn(a.f[1], a.f[2]);", {"MUFU.RCP", "FCHK", "FFMA"}},
    {"sqrt_rn", 80, "a.f[0] = sqrt_rn(a.f[1]);", {"MUFU.RSQ", "FFMA"}},
    {"max_ftz", 80, "a.f[0] = max_ftz(a.f[1], a.f[2]);", {"FMNMX.FTZ R", "!PT"}},
    {"min_ftz", 80, "a.f[0] = min_ftz(a.f[1], a.f[2]);", {"FMNMX.FTZ R", ", PT"}},
    {"abs", 80, "a.f[0] = add_rn(a.f[1], fovea::cuda::ptx::abs(a.f[2]));", {"FADD R", "|"}},
    {"abs_ftz", 80, "a.f[0] = max_ftz(a.f[1], abs_ftz(a.f[2]));", {"FMNMX.FTZ R", "|"}},
    {"max_nan", 80, "a.f[0] = max_nan(a.f[1], a.f[2]);", {"FMNMX.NAN R"}},
    {"cvt_bf16x2", 80, "a.u[0] = cvt_bf16x2(a.f[1], a.f[2]);", {"F2FP.BF16"}},
    {"max_nan", 75, "a.f[0] = max_nan(a.f[1], a.f[2]);", {"FMNMX R", "FADD R"}},
    {"cvt_bf16x2", 75, "a.u[0] = cvt_bf16x2(a.f[1], a.f[2]);", {"FSETP.NAN", "0x7fff"}},
    {"cvt_f16x2", 75, "a.u[0] = cvt_f16x2(a.f[1], a.f[2]);", {"F2F.F16.F32"}},
    {"cvt_f16x2", 80, "a.u[0] = cvt_f16x2(a.f[1], a.f[2]);", {"F2FP.PACK_AB"}},
    {"f32_of_bf16_lo", 80, "a.f[0] = f32_of_bf16_lo(a.u[1]);", {"STG.E"}},
    {"f32_of_bf16_hi", 80, "a.f[0] = f32_of_bf16_hi(a.u[1]);", {"LOP3.LUT"}},
    {"f32_of_f16_lo", 80, "a.f[0] = f32_of_f16_lo(a.u[1]);", {"HADD2.F32"}},
    {"f32_of_f16_hi", 80, "const std::uint32_t pair = ld_global(a.u); a.u[1] = pair; a.f[0] = f32_of_f16_hi(pair);", {"HADD2.F32", ".H1_H1"}},
    {"cvt_e4m3x2", 90, "a.u[0] = cvt_e4m3x2(a.f[1], a.f[2]);", {"F2FP.SATFINITE.E4M3"}},
    {"f16x2_of_e4m3x2_lo", 90, "a.u[0] = f16x2_of_e4m3x2_lo(a.u[1]);", {"F2FP.F16.E4M3.UNPACK_B"}},
    {"f16x2_of_e4m3x2_hi", 90, "a.u[0] = f16x2_of_e4m3x2_hi(a.u[1]);", {"F2FP.F16.E4M3.UNPACK_B"}},
    {"cvt_u8x4", 90, "a.u[0] = cvt_u8x4(a.f[1], a.f[2], a.f[3], a.f[4]);", {"F2IP.U8.F32.NTZ"}},
    {"cvt_s8x4", 90, "a.u[0] = cvt_s8x4(a.f[1], a.f[2], a.f[3], a.f[4]);", {"F2IP.S8.F32.NTZ"}},
    {"cvt_rna_tf32", 80, "a.u[0] = cvt_rna_tf32(a.f[1]);", {"0xffffe000"}},
    {"fma_bf16x2", 80, "a.u[0] = fma_bf16x2(a.u[1], a.u[2], a.u[3]);", {"HFMA2.BF16"}},
    {"mul_bf16x2", 80, "a.u[0] = mul_bf16x2(a.u[1], a.u[2]);", {"HFMA2.BF16"}},
    {"and_or", 80, "a.u[0] = and_or(a.u[1], a.u[2], a.u[3]);", {"LOP3.LUT"}},
    {"prmt", 80, "a.u[0] = prmt(a.u[1], a.u[2], a.u[3]);", {"PRMT"}},
    {"add_f16x2", 80, "a.u[0] = add_f16x2(a.u[1], a.u[2]);", {"HFMA2.MMA R"}},
    {"mul_f16x2", 80, "a.u[0] = mul_f16x2(a.u[1], a.u[2]);", {"HFMA2.MMA R"}},
    {"cvt_rni", 80, "a.f[0] = cvt_rni(a.f[1]);", {"FRND"}},

    // math_f32x2.cuh
    {"fma_rn_ftz_f32x2", 100, "const F32x2 d = fma_rn_ftz_f32x2({a.f[1], a.f[2]}, {a.f[3], a.f[4]}, {a.f[5], a.f[6]}); a.f[0] = d.x; a.f[8] = d.y;", {"FFMA2.FTZ R"}},
    {"add_rn_f32x2", 100, "const F32x2 d = add_rn_f32x2({a.f[1], a.f[2]}, {a.f[3], a.f[4]}); a.f[0] = d.x; a.f[8] = d.y;", {"FADD2 R"}},
    {"mul_rn_f32x2", 100, "const F32x2 d = mul_rn_f32x2({a.f[1], a.f[2]}, {a.f[3], a.f[4]}); a.f[0] = d.x; a.f[8] = d.y;", {"FMUL2 R"}},

    // exp_log.cuh
    {"exp_f32", 80, "a.f[0] = exp_f32(a.f[1]);", {"MUFU.EX2", "FFMA"}},
    {"log_f32", 80, "a.f[0] = log_f32(a.f[1]);", {"MUFU.LG2", "FFMA"}},

    // ordered.cuh
    {"ordered_ex2_approx_ftz", 80, "a.f[0] = ordered_ex2_approx_ftz(a.f[1]);", {"MUFU.EX2"}},
    {"ordered_fma_rn_ftz", 80, "a.f[0] = ordered_fma_rn_ftz(a.f[1], a.f[2], a.f[3]);", {"FFMA.FTZ"}},
    {"ordered_add_rn_ftz", 80, "a.f[0] = ordered_add_rn_ftz(a.f[1], a.f[2]);", {"FADD.FTZ"}},
    {"ordered_and_or", 80, "a.u[0] = ordered_and_or(a.u[1], a.u[2], a.u[3]);", {"LOP3.LUT"}},
    {"ordered_mad_lo", 80, "a.u[0] = ordered_mad_lo(a.u[1], a.u[2], a.u[3]);", {"IMAD R"}},
    {"ordered_cvt_bf16x2", 80, "a.u[0] = ordered_cvt_bf16x2(a.f[1], a.f[2]);", {"F2FP.BF16"}},
    {"ordered_cvt_f16x2", 80, "a.u[0] = ordered_cvt_f16x2(a.f[1], a.f[2]);", {"F2FP.PACK_AB"}},

    // warp.cuh
    {"shfl_bfly", 80, "a.f[0] = shfl_bfly(a.f[lane_idx()], 2);", {"SHFL.BFLY"}},
    {"shfl_idx", 80, "a.f[0] = shfl_idx(a.f[lane_idx()], a.n);", {"SHFL.IDX"}},
    {"vote_any", 80, "a.u[0] = vote_any(a.f[lane_idx()] > 0);", {"VOTE.ANY"}},
    {"vote_all", 80, "a.u[0] = vote_all(a.f[lane_idx()] > 0);", {"VOTE.ALL"}},
    {"ballot", 80, "a.u[0] = ptx::ballot(a.f[lane_idx()] > 0);", {"VOTE.ANY R"}},
    {"sync_warp", 80, "for (int i = lane_idx(); ld_global(a.i32 + i) < a.n; i += a.n) red_add_global(a.f, 1); sync_warp(); st_global(a.u, 1U);", {"BSYNC"}},
    {"elect_one", 90, "if (elect_one()) a.f[0] = 1;", {"ELECT"}},

    // barrier.cuh
    {"sync_threads", 80, "sync_threads();", {"BAR.SYNC.DEFER_BLOCKING 0x0"}},
    {"bar_sync", 80, "bar_sync(3, 64);", {"BAR.SYNC.DEFER_BLOCKING 0x3, 0x40"}},
    {"bar_arrive", 80, "bar_arrive(3, 64);", {"BAR.ARV 0x3, 0x40"}},

    // cp_async.cuh
    {"cp_async_16", 80, "cp_async_16(s, a.f, a.n);", {"LDGSTS.E.BYPASS.128.ZFILL"}},
    {"cp_async_16_or_zero", 80, "cp_async_16_or_zero(s, a.f, a.n > 3);", {"LDGSTS.E.BYPASS.128 [", "], P0"}},
    {"cp_async_8", 80, "cp_async_8(s, a.f, a.n);", {"LDGSTS.E.64.ZFILL"}},
    {"cp_async_4", 80, "cp_async_4(s, a.f, a.n);", {"LDGSTS.E.ZFILL ["}},
    {"cp_async_commit_group", 80, "cp_async_16(s, a.f, 16); cp_async_commit_group();", {"LDGDEPBAR"}},
    {"cp_async_wait_group", 80, "cp_async_16(s, a.f, 16); cp_async_commit_group(); cp_async_wait_group<1>();", {"DEPBAR.LE SB0, 0x1"}},

    // mma.cuh
    {"ldmatrix_x4", 80, "a.u[0] = ldmatrix_x4(s).w;", {"LDSM.16.M88.4 "}},
    {"ldmatrix_x4_trans", 80, "a.u[0] = ldmatrix_x4_trans(s).w;", {"LDSM.16.MT88.4 "}},
    {"ldmatrix_x2", 80, "a.u[0] = ldmatrix_x2(s).y;", {"LDSM.16.M88.2 "}},
    {"ldmatrix_x2_trans", 80, "a.u[0] = ldmatrix_x2_trans(s).y;", {"LDSM.16.MT88.2 "}},
    {"stmatrix_x4", 90, "stmatrix_x4(s, U32x4{1, 2, s, 4});", {"STSM.16.M88.4 "}},
    {"stmatrix_x4_trans", 90, "stmatrix_x4_trans(s, U32x4{1, 2, s, 4});", {"STSM.16.MT88.4 "}},
    {"mma_m16n8k16", 80, "float d[4] = {a.f[0]}; const std::uint32_t x[4] = {s, s, a.u[1], a.u[2]}; mma_m16n8k16<Element::bf16>(d, x, s, a.u[3]); mma_m16n8k16<Element::f16>(d, x, s, a.u[3]); a.f[0] = d[0];",
     {"HMMA.16816.F32.BF16", "HMMA.16816.F32 R"}},
    {"mma_m16n8k8_f16", 75, "float d[4] = {a.f[0]}; mma_m16n8k8_f16(d, a.u[1], a.u[2], a.u[3]); a.f[0] = d[0];", {"HMMA.1688.F32 "}},
    {"mma_m16n8k32_s8", 80, "float d[4] = {a.f[0]}; const std::uint32_t x[4] = {s, s, a.u[1], a.u[2]}; mma_m16n8k32_s8(d, x, s, a.u[3]); a.f[0] = d[0];", {"IMMA.16832.S8.S8"}},
    {"mma_m16n8k32_e4m3", 89, "float d[4] = {a.f[0]}; const std::uint32_t x[4] = {s, s, a.u[1], a.u[2]}; mma_m16n8k32_e4m3(d, x, s, a.u[3]); a.f[0] = d[0];", {"QMMA.16832.F32.E4M3.E4M3"}},
    {"mma_m16n8k8_tf32", 80, "float d[4] = {a.f[0]}; const std::uint32_t x[4] = {s, s, a.u[1], a.u[2]}; mma_m16n8k8_tf32(d, x, s, a.u[3]); a.f[0] = d[0];", {"HMMA.1688.F32.TF32"}},

    // mma_scaled.cuh
    {"mma_m16n8k64_e2m1", 120, "float d[4] = {a.f[0]}; const std::uint32_t x[4] = {s, s, a.u[1], a.u[2]}, y[2] = {s, a.u[3]}; mma_m16n8k64_e2m1<GroupScales::ue4m3_of_16, 1, 3>(d, x, y, s, a.u[4]); mma_m16n8k64_e2m1<GroupScales::ue8m0_of_32, 0, 2>(d, x, y, s, a.u[4]); a.f[0] = d[0];",
     {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "OMMA.SF.16864.F32.E2M1.E2M1.E8"}},
    {"cvt_e2m1x8", 120, "float x[8]; for (int i = 0; i < 8; ++i) x[i] = a.f[i]; a.u[0] = cvt_e2m1x8(x);", {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C"}},

    // mbarrier.cuh
    {"mbarrier_init", 90, "mbarrier_init(s, 3);", {"SYNCS.EXCH.64"}},
    {"mbarrier_inval", 90, "mbarrier_inval(s);", {"SYNCS.CCTL.IV"}},
    {"mbarrier_arrive", 90, "mbarrier_arrive(s);", {"SYNCS.ARRIVE.TRANS64.A1T0"}},
    {"mbarrier_arrive_count", 90, "mbarrier_arrive_count(s, 3);", {"SYNCS.ARRIVE.TRANS64.ART0"}},
    {"mbarrier_arrive_expect_tx", 90, "mbarrier_arrive_expect_tx(s, 1024);", {"SYNCS.ARRIVE.TRANS64"}},
    {"mbarrier_expect_tx", 90, "mbarrier_expect_tx(s, 1024);", {"SYNCS.ARRIVE.TRANS64.RED.A0TR"}},
    {"mbarrier_arrive_remote", 90, "mbarrier_arrive_remote(mapa(s, 1));", {"SYNCS.ARRIVE.TRANS64.RED.A1T0"}},
    {"mbarrier_arrive_release_remote", 90, "mbarrier_arrive_release_remote(mapa(s, 1));", {"CGAERRBAR", "SYNCS.ARRIVE.TRANS64.RED.A1T0"}},
    {"mbarrier_test_wait_parity", 90, "a.u[0] = mbarrier_test_wait_parity(s, 1);", {"SYNCS.PHASECHK.TRANS64 P"}},
    {"mbarrier_try_wait_parity", 90, "a.u[0] = mbarrier_try_wait_parity(s, 1);", {"SYNCS.PHASECHK.TRANS64.TRYWAIT"}},
    {"mbarrier_wait_parity", 90, "mbarrier_wait_parity(s, 1); mbarrier_wait_parity(s + 8, 1);", {"SYNCS.PHASECHK.TRANS64.TRYWAIT"}},
    {"mbarrier_wait_parity_acquire_cluster", 90, "mbarrier_wait_parity_acquire_cluster(s, 1);", {"SYNCS.PHASECHK.TRANS64.TRYWAIT"}},
    {"cp_async_mbarrier_arrive_noinc", 90, "cp_async_16(s, a.f, 16); cp_async_mbarrier_arrive_noinc(s + 16);", {"ARRIVES.LDGSTSBAR.64"}},

    // fence.cuh
    {"fence_proxy_async_shared_cta", 90, "fence_proxy_async_shared_cta();", {"FENCE.VIEW.ASYNC.S"}},
    {"fence_proxy_async_global", 90, "fence_proxy_async_global();", {"FENCE.VIEW.ASYNC.G"}},
    {"fence_proxy_async", 90, "fence_proxy_async();", {"FENCE.VIEW.ASYNC"}},
    {"fence_mbarrier_init_release_cluster", 90, "fence_mbarrier_init_release_cluster();", {"EXIT"}},
    {"fence_acq_rel_cluster", 90, "fence_acq_rel_cluster();", {"MEMBAR"}},

    // bulk.cuh
    {"cp_async_bulk_load", 90, "cp_async_bulk_load(s, a.f, 1024, s + 8, CachePolicy::evict_first);", {"UBLKCP.S.G"}},
    {"cp_async_bulk_shared_to_cluster", 90, "cp_async_bulk_shared_to_cluster(mapa(s, 1), s, 1024, mapa(s + 8, 1));", {"UBLKCP"}},
    {"cp_async_bulk_store", 90, "cp_async_bulk_store(a.f, s, 1024);", {"UBLKCP.G.S"}},
    {"cp_reduce_async_bulk_add_f32", 90, "cp_reduce_async_bulk_add_f32(a.f, s, 1024);", {"UBLKRED"}},
    {"cp_async_bulk_commit_group", 90, "cp_async_bulk_store(a.f, s, 1024); cp_async_bulk_commit_group();", {"UTMACMDFLUSH"}},
    {"cp_async_bulk_wait_group", 90, "cp_async_bulk_store(a.f, s, 1024); cp_async_bulk_commit_group(); cp_async_bulk_wait_group<0>();", {"DEPBAR"}},
    {"cp_async_bulk_wait_group_read", 90, "cp_async_bulk_store(a.f, s, 1024); cp_async_bulk_commit_group(); cp_async_bulk_wait_group_read<1>();", {"DEPBAR.LE SB0, 0x1"}},
    {"cp_async_bulk_prefetch_l2", 90, "cp_async_bulk_prefetch_l2(a.f, 1024);", {"UBLKPF"}},

    // tma.cuh
    {"prefetch_tensormap", 90, "prefetch_tensormap(&a.map);", {"UTMACCTL.PF"}},
    {"cp_async_bulk_tensor_load", 90, "const auto p = CachePolicy::evict_last; cp_async_bulk_tensor_load(s, &a.map, {1}, s + 8, p); cp_async_bulk_tensor_load(s, &a.map, {1, 2}, s + 8, p); cp_async_bulk_tensor_load(s, &a.map, {1, 2, 3}, s + 8, p); cp_async_bulk_tensor_load(s, &a.map, {1, 2, 3, 4}, s + 8, p); cp_async_bulk_tensor_load(s, &a.map, {1, 2, 3, 4, a.n}, s + 8, p);",
     {"UTMALDG.1D", "UTMALDG.2D", "UTMALDG.3D", "UTMALDG.4D", "UTMALDG.5D"}},
    {"cp_async_bulk_tensor_load_multicast", 90, "const auto p = CachePolicy::evict_last; cp_async_bulk_tensor_load_multicast(s, &a.map, {1}, s + 8, 3, p); cp_async_bulk_tensor_load_multicast(s, &a.map, {1, 2}, s + 8, 3, p); cp_async_bulk_tensor_load_multicast(s, &a.map, {1, 2, 3}, s + 8, 3, p); cp_async_bulk_tensor_load_multicast(s, &a.map, {1, 2, 3, 4}, s + 8, 3, p); cp_async_bulk_tensor_load_multicast(s, &a.map, {1, 2, 3, 4, a.n}, s + 8, 3, p);",
     {"UTMALDG.1D.MULTICAST", "UTMALDG.2D.MULTICAST", "UTMALDG.3D.MULTICAST", "UTMALDG.4D.MULTICAST", "UTMALDG.5D.MULTICAST"}},
    {"cp_async_bulk_tensor_store", 90, "cp_async_bulk_tensor_store(&a.map, {1}, s); cp_async_bulk_tensor_store(&a.map, {1, 2}, s); cp_async_bulk_tensor_store(&a.map, {1, 2, 3}, s); cp_async_bulk_tensor_store(&a.map, {1, 2, 3, 4}, s); cp_async_bulk_tensor_store(&a.map, {1, 2, 3, 4, a.n}, s);",
     {"UTMASTG.1D", "UTMASTG.2D", "UTMASTG.3D", "UTMASTG.4D", "UTMASTG.5D"}},
    {"cp_reduce_async_bulk_tensor_add", 90, "cp_reduce_async_bulk_tensor_add(&a.map, {1}, s); cp_reduce_async_bulk_tensor_add(&a.map, {1, 2}, s); cp_reduce_async_bulk_tensor_add(&a.map, {1, 2, 3}, s); cp_reduce_async_bulk_tensor_add(&a.map, {1, 2, 3, 4}, s); cp_reduce_async_bulk_tensor_add(&a.map, {1, 2, 3, 4, a.n}, s);",
     {"UTMAREDG.1D.ADD", "UTMAREDG.2D.ADD", "UTMAREDG.3D.ADD", "UTMAREDG.4D.ADD", "UTMAREDG.5D.ADD"}},
    {"cp_async_bulk_prefetch_tensor", 90, "cp_async_bulk_prefetch_tensor(&a.map, {1}); cp_async_bulk_prefetch_tensor(&a.map, {1, 2}); cp_async_bulk_prefetch_tensor(&a.map, {1, 2, 3}); cp_async_bulk_prefetch_tensor(&a.map, {1, 2, 3, 4}); cp_async_bulk_prefetch_tensor(&a.map, {1, 2, 3, 4, a.n});",
     {"UTMAPF.L2.1D", "UTMAPF.L2.2D", "UTMAPF.L2.3D", "UTMAPF.L2.4D", "UTMAPF.L2.5D"}},

    // cluster.cuh
    {"cluster_cta_rank", 90, "a.i32[0] = cluster_cta_rank();", {"SR_CgaCtaId"}},
    {"cluster_num_ctas", 90, "a.i32[0] = cluster_num_ctas();", {"STG.E"}},
    {"barrier_cluster_arrive", 90, "barrier_cluster_arrive();", {"UCGABAR_ARV", "MEMBAR"}},
    {"barrier_cluster_arrive_relaxed", 90, "barrier_cluster_arrive_relaxed();", {"UCGABAR_ARV"}},
    {"barrier_cluster_wait", 90, "barrier_cluster_wait();", {"UCGABAR_WAIT"}},
    {"mapa", 90, "a.u[0] = mapa(s, a.n);", {"PRMT"}},
    {"ld_shared_cluster", 90, "a.f[0] = ld_shared_cluster<float>(mapa(s, a.n));", {"LD.E"}},
    {"st_shared_cluster", 90, "st_shared_cluster(mapa(s, a.n), 1.5F);", {"ST.E"}},
    {"st_async", 90, "st_async(mapa(s, 1), 1.5F, mapa(s + 8, 1)); st_async(mapa(s, 1), U32x2{1, s}, mapa(s + 8, 1)); st_async(mapa(s, 1), U32x4{1, 2, s, 4}, mapa(s + 8, 1));", {"STAS [", "STAS.64 ", "STAS.128 "}},

    // setmaxnreg.cuh
    {"setmaxnreg_inc", 90, "setmaxnreg_inc<232>();", {"USETMAXREG.TRY_ALLOC"}},
    {"setmaxnreg_dec", 90, "setmaxnreg_dec<40>();", {"USETMAXREG.DEALLOC"}},

    // griddepcontrol.cuh
    {"griddepcontrol_wait", 90, "griddepcontrol_wait();", {"ACQBULK"}},
    {"griddepcontrol_launch_dependents", 90, "griddepcontrol_launch_dependents();", {"PREEXIT"}},

    // red.cuh
    {"red_add_global_v4", 90, "red_add_global_v4(a.f, F32x4{1, 2, 3, 4});", {"REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU"}},
    {"red_add_global_v2", 90, "red_add_global_v2(a.f, F32x2{1, 2});", {"REDG.E.ADD.F32x2.FTZ.RN.STRONG.GPU"}},
    {"red_add_global_v4_bf16x2", 90, "red_add_global_v4_bf16x2(a.f, U32x4{1, 2, 3, 4});", {"REDG.E.ADD.BF16x8.RN.STRONG.GPU"}},

    // wgmma.cuh; every form has its own test
    {"is_16_bit", 90, "static_assert(is_16_bit(WgmmaType::f16) && !is_16_bit(WgmmaType::s8));", {"EXIT"}},
    {"is_wgmma_form", 90, "static_assert(is_wgmma_form(WgmmaType::e4m3, WgmmaType::e5m2, 40) && !is_wgmma_form(WgmmaType::s8, WgmmaType::u8, 40) && !is_wgmma_form(WgmmaType::bf16, WgmmaType::f16, 64));", {"EXIT"}},
    {"computed_here", 90, "const MatrixDescriptor d = computed_here(a.n); a.u[0] = static_cast<std::uint32_t>(d); a.u[1] = static_cast<std::uint32_t>(d >> 32);", {"STG.E"}},
    {"wgmma_forget", 90, "float d[32] = {}; wgmma_forget(d); a.f[0] = 1; a.f[1] = d[0];", {"STG.E"}},
    {"wgmma_fence", 90, "wgmma_fence();", {"WARPGROUP.ARRIVE"}},
    {"wgmma_ss", 90, "float d[32] = {}; wgmma_fence(); wgmma_ss<WgmmaType::bf16, WgmmaType::bf16, 64, Major::k, Major::mn>(d, s, s + 1, false); wgmma_commit_group(); wgmma_wait_group<0>(); a.f[0] = d[0];",
     {"HGMMA.64x64x16.F32.BF16", ".tnspB"}},
    {"wgmma_rs", 90, "float d[32] = {}; const std::uint32_t x[4] = {a.u[0], s, s, 4}; wgmma_fence(); wgmma_rs<WgmmaType::bf16, WgmmaType::bf16, 64>(d, x, 1, a.n == 0); wgmma_commit_group(); wgmma_wait_group<0>(); a.f[0] = d[0];",
     {"HGMMA.64x64x16.F32.BF16 R"}},
    {"wgmma_commit_group", 90, "float d[32] = {}; wgmma_fence(); wgmma_ss<WgmmaType::bf16, WgmmaType::bf16, 64>(d, s, s, true); wgmma_commit_group(); wgmma_wait_group<0>(); a.f[0] = d[0];", {"gsb0"}},
    {"wgmma_wait_group", 90, "wgmma_wait_group<1>();", {"WARPGROUP.DEPBAR.LE gsb0, 0x1"}},

    // tcgen05.cuh; every form has its own test
    {"is_tmem_allocation", 100, "static_assert(is_tmem_allocation(32) && !is_tmem_allocation(96) && !is_tmem_allocation(1024));", {"EXIT"}},
    {"is_tcgen05_kind", 100, "static_assert(is_tcgen05_kind<Tcgen05Kind::f16, 2>());", {"EXIT"}},
    {"tcgen05_alloc", 100, "tcgen05_alloc<512>(s);", {"UTCATOMSWS.FIND_AND_SET.ALIGN"}},
    {"tcgen05_dealloc", 100, "tcgen05_dealloc<512>(t);", {"UTCATOMSWS.AND"}},
    {"tcgen05_relinquish_alloc_permit", 100, "tcgen05_relinquish_alloc_permit();", {"UVIRTCOUNT.DEALLOC.SMPOOL"}},
    {"tcgen05_fence_before_thread_sync", 100, "tcgen05_fence_before_thread_sync();", {"EXIT"}},
    {"tcgen05_fence_after_thread_sync", 100, "tcgen05_fence_after_thread_sync();", {"EXIT"}},
    {"tcgen05_commit", 100, "if (elect_one()) tcgen05_commit(s);", {"UTCBAR ["}},
    {"tcgen05_commit_multicast", 100, "if (elect_one()) tcgen05_commit_multicast<2>(s, std::uint16_t(a.n));", {"UTCBAR.2CTA.MULTICAST"}},
    {"tcgen05_mma_ss", 100, "if (elect_one()) tcgen05_mma_ss<Tcgen05Kind::f16>(t, {s}, {s}, {s}, a.n > 0);", {"UTCHMMA gdesc"}},
    {"tcgen05_mma_ts", 100, "if (elect_one()) tcgen05_mma_ts<Tcgen05Kind::f8f6f4>(t, t, {s}, {s}, true);", {"UTCQMMA tmem"}},
    {"tcgen05_mma_ss_masked", 100, "if (elect_one()) tcgen05_mma_ss_masked<Tcgen05Kind::f16>(t, {s}, {s}, {s}, {1, 2, 3, s}, true);", {"UTCHMMA gdesc"}},
    {"tcgen05_mma_ts_masked", 100, "if (elect_one()) tcgen05_mma_ts_masked<Tcgen05Kind::f16, 2>(t, t, {s}, {s}, {1, 2, 3, s, 5, 6, 7, 8}, true);", {"UTCHMMA.2CTA tmem"}},
    {"tcgen05_mma_scaled_ss", 100, "if (elect_one()) tcgen05_mma_scaled_ss<Tcgen05ScaledKind::mxf4nvf4_block16>(t, {s}, {s}, {s}, t, t, true);", {"UTCOMMA", " gdesc"}},
    {"tcgen05_mma_scaled_ts", 100, "if (elect_one()) tcgen05_mma_scaled_ts<Tcgen05ScaledKind::mxf8f6f4_block32>(t, t, {s}, {s}, t, t, true);", {"UTCQMMA tmem"}},
    {"tcgen05_cp", 100, "if (elect_one()) tcgen05_cp<TmemCopy::rows32x128b_warpx4>(t, {s});", {"UTCCP.T.S.4x32dp128bit"}},

    // tcgen05_ld_st.cuh; every count has its own test
    {"tcgen05_ld_32x32b", 100, "float r[8]; tcgen05_ld_32x32b(r, t); tcgen05_wait_ld(r); a.f[0] = r[7];", {"LDTM.x8"}},
    {"tcgen05_ld_16x64b", 100, "float r[8]; tcgen05_ld_16x64b(r, t); tcgen05_wait_ld(r); a.f[0] = r[7];", {"LDTM.16dp64bit.x8"}},
    {"tcgen05_ld_16x128b", 100, "float r[8]; tcgen05_ld_16x128b(r, t); tcgen05_wait_ld(r); a.f[0] = r[7];", {"LDTM.16dp128bit.x4"}},
    {"tcgen05_ld_16x256b", 100, "float r[8]; tcgen05_ld_16x256b(r, t); tcgen05_wait_ld(r); a.f[0] = r[7];", {"LDTM.16dp256bit.x2"}},
    {"tcgen05_ld_16x32bx2", 100, "float r[8]; tcgen05_ld_16x32bx2<16>(r, t); tcgen05_wait_ld(r); a.f[0] = r[7];", {"LDTM.16dp32bit_t0_t15.x8", "LDTM.16dp32bit_t16_t31.x8"}},
    {"tcgen05_ld_max_32x32b", 103, "float r[8], m; tcgen05_ld_max_32x32b(r, m, t); tcgen05_wait_ld(r, m); a.f[0] = m;", {"LDTM.STAT.x8.MAX.F32"}},
    {"tcgen05_st_32x32b", 100, "const std::uint32_t r[4] = {s, 1, 2, s}; tcgen05_st_32x32b(t, r);", {"STTM.x4"}},
    {"tcgen05_st_16x64b", 100, "const std::uint32_t r[4] = {s, 1, 2, s}; tcgen05_st_16x64b(t, r);", {"STTM.16dp64bit.x4"}},
    {"tcgen05_st_16x128b", 100, "const std::uint32_t r[4] = {s, 1, 2, s}; tcgen05_st_16x128b(t, r);", {"STTM.16dp128bit.x2"}},
    {"tcgen05_st_16x256b", 100, "const std::uint32_t r[4] = {s, 1, 2, s}; tcgen05_st_16x256b(t, r);", {"STTM.16dp256bit "}},
    {"tcgen05_st_16x32bx2", 100, "const std::uint32_t r[4] = {s, 1, 2, s}; tcgen05_st_16x32bx2<4>(t, r);", {"STTM.16dp32bit_t0_t15.x4", "STTM.16dp32bit_t16_t31.x4"}},
    {"known_from_here", 100, "float r[2] = {a.f[0], a.f[1]}; known_from_here(r); a.f[0] = r[1];", {"STG.E"}},
    {"tcgen05_wait_ld", 100, "float r[8]; tcgen05_ld_32x32b(r, t); tcgen05_wait_ld(r); a.f[0] = r[7];", {"LDTM.x8"}},
    {"tcgen05_wait_st", 100, "const std::uint32_t r[4] = {s, 1, 2, s}; tcgen05_st_32x32b(t, r); tcgen05_wait_st();", {"FENCE.VIEW.ASYNC.T"}},
};
// clang-format on

}  // namespace fovea::cuda

// rms_norm_f16_group256: mode row, grid [rows, 1, 1], 256 threads, 32 bytes shared
//   x: f16 buffer, in
//   weight: f16 buffer, in
//   y: f16 buffer, out
//   width: u32 constant
//   eps: f32 constant
//   requires width divisible by 8
template <uint width, uint eps_bits>
__device__ __forceinline__ void rms_norm_f16_group256(const f16* __restrict__ x, const f16* __restrict__ weight, f16* y) {
  const float eps = tk_bits<float>(eps_bits);
  const uint tid = threadIdx.x;
  const uint lane = threadIdx.x & 31u;
  const uint simd = threadIdx.x >> 5;
  __shared__ __align__(16) float shared0[8];
  float r0;
  uint v3 = blockIdx.x * width;  // kernels.rs
  r0 = 0.0f;  // kernels.rs
  for (uint v9 = tid; v9 < width; v9 += 256u) {  // kernels.rs
    float v12 = tk_f32(x[v3 + v9]);  // kernels.rs
    r0 = r0 + v12 * v12;  // kernels.rs
  }
  float v20 = tk_simd_sum(r0);  // kernels.rs
  __syncthreads();
  if (lane == 0u) {
    shared0[simd] = v20;  // dsl.rs
  }
  __syncthreads();  // kernels.rs
  float v41 = shared0[0u] + shared0[1u] + shared0[2u] + shared0[3u] + shared0[4u] + shared0[5u];
  float v51 = rsqrtf((v41 + shared0[6u] + shared0[7u]) / float(width) + eps);
  for (uint v55 = tid; v55 < width; v55 += 256u) {  // kernels.rs
    y[v3 + v55] = f16(tk_f32(x[v3 + v55]) * v51 * tk_f32(weight[v55]));  // kernels.rs
  }
}

// numbers: mode element, grid [1, 1, 1], 32 threads
//   a: f32 buffer, in
//   b: i32 buffer, in
//   c: u32 buffer, in
//   y: f32 buffer, out
//   z: i32 buffer, out
//   w: u32 buffer, out
//   by: f32 argument
//   shift: i32 argument
extern "C" __global__ void __launch_bounds__(32) numbers(const float* __restrict__ a, const int* __restrict__ b, const uint* __restrict__ c, float* y, int* z, uint* w, float by, int shift) {
  const uint tid = threadIdx.x;
  float v3 = a[tid];  // kernels.rs
  float v6 = a[tid + 32u];
  float v9 = fabsf(v3) + 0.5f;  // kernels.rs
  y[tid + 0u] = -v3;  // kernels.rs
  y[tid + 32u] = v9;
  y[tid + 64u] = expf(v3);
  y[tid + 96u] = exp2f(v3);
  y[tid + 128u] = logf(v9);
  y[tid + 160u] = log2f(v9);
  y[tid + 192u] = sinf(v3);
  y[tid + 224u] = cosf(v3);
  y[tid + 256u] = tanhf(v3);
  y[tid + 288u] = sqrtf(v9);
  y[tid + 320u] = rsqrtf(v9);
  y[tid + 352u] = floorf(v3);
  y[tid + 384u] = ceilf(v3);
  y[tid + 416u] = rintf(v3);
  y[tid + 448u] = v3 + v6;
  y[tid + 480u] = v3 - v6;
  y[tid + 512u] = v3 * v6;
  y[tid + 544u] = v3 / v9;
  y[tid + 576u] = min(v3, v6);
  y[tid + 608u] = max(v3, v6);
  y[tid + 640u] = fmaf(v3, v6, by);
  y[tid + 672u] = v3 - (v6 - by);
  y[tid + 704u] = v3 / (v9 / 2.0f);
  y[tid + 736u] = - -v3;
  y[tid + 768u] = (v3 + v6) * (v3 - v6);
  y[tid + 800u] = min(max(v3, tk_bits<float>(0xff800000u)), tk_bits<float>(0x7f800000u));
  y[tid + 832u] = v3 < v6 ? v3 : v6;
  y[tid + 864u] = v3 == v6 ? 1.0f : -1.5e-7f;
  y[tid + 896u] = v3 - -v6;
  int v110 = b[tid];  // kernels.rs
  int v113 = b[tid + 32u];
  int v117 = (v113 & 15) | 1;  // kernels.rs
  z[tid + 0u] = int(0u - uint(v110));  // kernels.rs
  z[tid + 32u] = v110 ^ -1;
  z[tid + 64u] = int(uint(v110) + uint(v113));
  z[tid + 96u] = int(uint(v110) - uint(v113));
  z[tid + 128u] = int(uint(v110) * uint(v113));
  z[tid + 160u] = v110 / v117;
  z[tid + 192u] = v110 % v117;
  z[tid + 224u] = min(v110, v113);
  z[tid + 256u] = max(v110, v113);
  z[tid + 288u] = v110 & v113;
  z[tid + 320u] = v110 | v113;
  z[tid + 352u] = v110 ^ v113;
  z[tid + 384u] = int(uint(v110) << (v113 & 7));
  z[tid + 416u] = v110 >> shift;
  z[tid + 448u] = int(uint(v110) - uint(int(uint(v113) - 3u)));
  z[tid + 480u] = int(uint(int(uint(v110) + uint(v113))) * 5u);
  z[tid + 512u] = v110 < v113 ? v110 : (-2147483647 - 1);
  z[tid + 544u] = v110 >= v113 ? v113 : -1;
  uint v183 = c[tid];  // kernels.rs
  uint v186 = c[tid + 32u];
  uint v190 = (v186 & 15u) | 1u;  // kernels.rs
  w[tid + 0u] = ~v183;  // kernels.rs
  w[tid + 32u] = uint(__popc(v183));
  w[tid + 64u] = uint(__clz(v183));
  w[tid + 96u] = v183 + v186;
  w[tid + 128u] = v183 - v186;
  w[tid + 160u] = v183 * v186;
  w[tid + 192u] = v183 / v190;
  w[tid + 224u] = v183 % v190;
  w[tid + 256u] = min(v183, v186);
  w[tid + 288u] = max(v183, v186);
  w[tid + 320u] = v183 & v186;
  w[tid + 352u] = v183 | v186;
  w[tid + 384u] = v183 ^ v186;
  w[tid + 416u] = v183 << (v186 & 7u);
  w[tid + 448u] = v183 >> (v186 & 7u);
  w[tid + 480u] = __umulhi(v183, v186);
  w[tid + 512u] = v183 > v186 ? v183 : 7u;
  w[tid + 544u] = v183 != v186 ? v186 : 4294967295u;
  w[tid + 576u] = v183 - (v186 - 3u);
  w[tid + 608u] = v183 / (v190 % 4u + 1u);
  w[tid + 640u] = ((v183 & 3u) << 4u) | (v186 >> 28u);
  w[tid + 672u] = (uint(__popc(v183)) - uint(__popc(v186))) >> 1u;
  w[tid + 704u] = (v183 <= v186 && v3 < v6) || !(v110 == v113) ? 1u : 0u;
  w[tid + 736u] = (v183 < v186) != (v3 > v6) ? 1u : 0u;
  w[tid + 768u] = tk_lookup(v183, 857870592u, 2003195204u, 3148519816u, 4293844428u);
  w[tid + 800u] = tk_lookup(v183 >> 16u, 420546560u, 993208866u, 1565871172u, 2138533478u);
  z[tid + 576u] = tk_dot4(v183, v186, v110);  // kernels.rs
}

// casts: mode element, grid [1, 1, 1], 32 threads
//   x: f32 buffer, in
//   h: f16 buffer, out
//   r: bf16 buffer, out
//   s: i8 buffer, out
//   u: u8 buffer, out
//   m: i16 buffer, out
//   n: u16 buffer, out
//   i: i32 buffer, out
//   w: u32 buffer, out
//   f: f32 buffer, out
extern "C" __global__ void __launch_bounds__(32) casts(const float* __restrict__ x, f16* h, bf16* r, schar* s, uchar* u, short* m, ushort* n, int* i, uint* w, float* f) {
  const uint tid = threadIdx.x;
  float v1 = x[tid];  // kernels.rs
  h[tid] = f16(v1);  // kernels.rs
  r[tid] = bf16(v1);  // kernels.rs
  s[tid] = tk_i8(v1);  // kernels.rs
  u[tid] = tk_u8(v1);  // kernels.rs
  m[tid] = tk_i16(v1);  // kernels.rs
  n[tid] = tk_u16(v1);  // kernels.rs
  i[tid] = tk_i32(v1);  // kernels.rs
  w[tid] = tk_u32(v1);  // kernels.rs
  float v23 = tk_f32(h[tid]) + tk_f32(r[tid]) + float(s[tid]) + float(u[tid]) + float(m[tid]);  // kernels.rs
  f[tid] = v23 + float(n[tid]);  // kernels.rs
  f[tid + 32u] = float(i[tid]) + float(w[tid]);  // kernels.rs
  int v43 = int(uint(int(uint(int(s[tid])) + uint(int(m[tid])))) + uint(int(u[tid])));  // kernels.rs
  i[tid + 32u] = int(uint(v43) + uint(int(n[tid])));
  uint v60 = (uint(s[tid]) ^ uint(tk_bits<ushort>(h[tid]))) ^ (uint(tk_bits<ushort>(r[tid])) << 16u);  // kernels.rs
  w[tid + 32u] = v60;
  h[tid + 32u] = f16(float(i[tid]));  // kernels.rs
  s[tid + 32u] = schar(i[tid]);  // kernels.rs
  u[tid + 32u] = uchar(w[tid]);  // kernels.rs
  m[tid + 32u] = short(i[tid]);  // kernels.rs
  n[tid + 32u] = ushort(w[tid]);  // kernels.rs
  r[tid + 32u] = bf16(tk_f32(h[tid]));  // kernels.rs
  w[tid + 64u] = (tk_bits<uint>(v1) ^ tk_bits<uint>(i[tid])) ^ uint(v1 != 0.0f);  // kernels.rs
  f[tid + 64u] = float(tk_bits<int>(w[tid + 64u]) != 0);  // kernels.rs
}

// vectors: mode element, grid [1, 1, 1], 32 threads
//   a: f16 buffer, in
//   b: i8 buffer, in
//   c: u8 buffer, in
//   d: bf16 buffer, in
//   e: f32 buffer, in
//   y: f32 buffer, out
//   h: f16 buffer, out
//   g: i8 buffer, out
//   k: bf16 buffer, out
//   requires a aligned to 16
//   requires b aligned to 16
//   requires c aligned to 16
//   requires d aligned to 16
//   requires e aligned to 16
//   requires y aligned to 16
//   requires h aligned to 16
//   requires g aligned to 16
//   requires k aligned to 16
extern "C" __global__ void __launch_bounds__(32) vectors(const f16* __restrict__ a, const schar* __restrict__ b, const uchar* __restrict__ c, const bf16* __restrict__ d, const float* __restrict__ e_, float* y, f16* h, schar* g, bf16* k) {
  const uint tid = threadIdx.x;
  float r0;
  r0 = 0.0f;  // kernels.rs
  uint4 v5 = tk_stream((const uint4*)(a + tid * 8u));  // kernels.rs
  r0 = r0 + tk_f32(tk_part<f16>(v5.x, 0));  // kernels.rs
  r0 = r0 + tk_f32(tk_part<f16>(v5.x, 1));
  r0 = r0 + tk_f32(tk_part<f16>(v5.y, 0));
  r0 = r0 + tk_f32(tk_part<f16>(v5.y, 1));
  r0 = r0 + tk_f32(tk_part<f16>(v5.z, 0));
  r0 = r0 + tk_f32(tk_part<f16>(v5.z, 1));
  r0 = r0 + tk_f32(tk_part<f16>(v5.w, 0));
  r0 = r0 + tk_f32(tk_part<f16>(v5.w, 1));
  uint4 v56 = *(const uint4*)(b + tid * 16u);  // kernels.rs
  r0 = r0 + float(tk_part<schar>(v56.x, 0));  // kernels.rs
  r0 = r0 + float(tk_part<schar>(v56.x, 1));
  r0 = r0 + float(tk_part<schar>(v56.x, 2));
  r0 = r0 + float(tk_part<schar>(v56.x, 3));
  r0 = r0 + float(tk_part<schar>(v56.y, 0));
  r0 = r0 + float(tk_part<schar>(v56.y, 1));
  r0 = r0 + float(tk_part<schar>(v56.y, 2));
  r0 = r0 + float(tk_part<schar>(v56.y, 3));
  r0 = r0 + float(tk_part<schar>(v56.z, 0));
  r0 = r0 + float(tk_part<schar>(v56.z, 1));
  r0 = r0 + float(tk_part<schar>(v56.z, 2));
  r0 = r0 + float(tk_part<schar>(v56.z, 3));
  r0 = r0 + float(tk_part<schar>(v56.w, 0));
  r0 = r0 + float(tk_part<schar>(v56.w, 1));
  r0 = r0 + float(tk_part<schar>(v56.w, 2));
  r0 = r0 + float(tk_part<schar>(v56.w, 3));
  uint v155 = tk_stream((const uint*)(c + tid * 4u));  // kernels.rs
  r0 = r0 + float(tk_part<uchar>(v155, 0));  // kernels.rs
  r0 = r0 + float(tk_part<uchar>(v155, 1));
  r0 = r0 + float(tk_part<uchar>(v155, 2));
  r0 = r0 + float(tk_part<uchar>(v155, 3));
  uint v182 = *(const uint*)(d + tid * 2u);  // kernels.rs
  r0 = r0 + tk_f32(tk_part<bf16>(v182, 0));  // kernels.rs
  r0 = r0 + tk_f32(tk_part<bf16>(v182, 1));
  float4 v197 = tk_stream((const float4*)(e_ + tid * 4u));  // kernels.rs
  r0 = r0 + v197.x;  // kernels.rs
  r0 = r0 + v197.y;
  r0 = r0 + v197.z;
  r0 = r0 + v197.w;
  uint2 v220 = *(const uint2*)(d + tid * 4u);  // kernels.rs
  r0 = r0 + tk_f32(tk_part<bf16>(v220.x, 0));  // kernels.rs
  r0 = r0 + tk_f32(tk_part<bf16>(v220.x, 1));
  r0 = r0 + tk_f32(tk_part<bf16>(v220.y, 0));
  r0 = r0 + tk_f32(tk_part<bf16>(v220.y, 1));
  ushort v249 = *(const ushort*)(b + tid * 2u);  // kernels.rs
  r0 = r0 + (tk_f32(tk_stream(a + tid)) + float(tk_part<schar>(v249, 1)));
  *(float4*)(y + tid * 4u) = make_float4(r0, v197.w, v197.z, v197.y);  // kernels.rs
  uint4 v266 = *(const uint4*)(a + tid * 8u);  // kernels.rs
  uint4 v277 = make_uint4(tk_pack(tk_part<f16>(v266.w, 1), tk_part<f16>(v266.w, 0)), tk_pack(tk_part<f16>(v266.z, 1), tk_part<f16>(v266.z, 0)), tk_pack(tk_part<f16>(v266.y, 1), tk_part<f16>(v266.y, 0)), tk_pack(tk_part<f16>(v266.x, 1), tk_part<f16>(v266.x, 0)));  // kernels.rs
  *(uint4*)(h + tid * 8u) = v277;
  uint4 v280 = *(const uint4*)(b + tid * 16u);  // kernels.rs
  uint4 v299 = make_uint4(tk_pack(tk_part<schar>(v280.w, 3), tk_part<schar>(v280.w, 2), tk_part<schar>(v280.w, 1), tk_part<schar>(v280.w, 0)), tk_pack(tk_part<schar>(v280.z, 3), tk_part<schar>(v280.z, 2), tk_part<schar>(v280.z, 1), tk_part<schar>(v280.z, 0)), tk_pack(tk_part<schar>(v280.y, 3), tk_part<schar>(v280.y, 2), tk_part<schar>(v280.y, 1), tk_part<schar>(v280.y, 0)), tk_pack(tk_part<schar>(v280.x, 3), tk_part<schar>(v280.x, 2), tk_part<schar>(v280.x, 1), tk_part<schar>(v280.x, 0)));  // kernels.rs
  *(uint4*)(g + tid * 16u) = v299;
  *(uint*)(k + tid * 2u) = tk_pack(bf16(v197.x), bf16(v197.y));  // kernels.rs
}

// lanes: mode element, grid [2, 1, 1], 64 threads
//   x: f32 buffer, in
//   n: u32 buffer, in
//   y: f32 buffer, out
//   m: u32 buffer, out
//   s: i32 buffer, out
extern "C" __global__ void __launch_bounds__(64) lanes(const float* __restrict__ x, const uint* __restrict__ n, float* y, uint* m, int* s) {
  const uint tid = threadIdx.x;
  const uint lane = threadIdx.x & 31u;
  const uint simd = threadIdx.x >> 5;
  uint v4 = blockIdx.x * 64u + tid;  // kernels.rs
  float v5 = x[v4];  // kernels.rs
  uint v6 = n[v4];
  float v7 = tk_simd_sum(v5);  // kernels.rs
  y[v4] = v7;
  float v10 = tk_simd_max(v5);  // kernels.rs
  y[v4 + 128u] = v10;
  float v13 = tk_simd_min(v5);  // kernels.rs
  y[v4 + 256u] = v13;
  float v19 = __shfl_sync(~0u, v5, lane ^ 5u);  // kernels.rs
  y[v4 + 384u] = v19;
  float v22 = __shfl_xor_sync(~0u, v5, 16);  // kernels.rs
  y[v4 + 512u] = v22;
  uint v23 = tk_simd_sum(v6);  // kernels.rs
  m[v4] = v23;
  uint v26 = tk_simd_max(v6);  // kernels.rs
  m[v4 + 128u] = v26;
  uint v29 = tk_simd_prefix(v6);  // kernels.rs
  m[v4 + 256u] = v29;
  uint v34 = __ballot_sync(~0u, v5 > 0.0f);  // kernels.rs
  m[v4 + 384u] = v34;
  bool v39 = __any_sync(~0u, v5 > 0.9f) != 0;  // kernels.rs
  bool v45 = __all_sync(~0u, v5 > -0.9f) != 0;
  m[v4 + 512u] = (v39 ? 1u : 0u) + (v45 ? 2u : 0u);  // kernels.rs
  m[v4 + 640u] = gridDim.x * simd;  // kernels.rs
  int v55 = tk_bits<int>(v6);  // kernels.rs
  int v56 = tk_simd_sum(v55);  // kernels.rs
  s[v4] = v56;
  int v59 = tk_simd_min(v55);  // kernels.rs
  s[v4 + 128u] = v59;
  int v62 = tk_simd_prefix(v55);  // kernels.rs
  s[v4 + 256u] = v62;
}

// control: mode element, grid [1, 1, 1], 64 threads, 256 bytes shared
//   x: f32 buffer, inout
//   n: u32 argument
extern "C" __global__ void __launch_bounds__(64) control(float* x, uint n) {
  const uint tid = threadIdx.x;
  __shared__ __align__(16) float held[64];
  float r0[4];
  float r1;
  r0[0u] = 0.0f;  // kernels.rs
  r0[1u] = 0.0f;
  r0[2u] = 0.0f;
  r0[3u] = 0.0f;
  TK_UNROLL  // kernels.rs
  for (uint v10 = 0u; v10 < 4u; ++v10) {
    r0[v10] = x[tid + v10 * 64u] * 2.0f;  // kernels.rs
  }
  held[tid] = r0[3u] + r0[0u];  // kernels.rs
  __syncthreads();  // kernels.rs
  r1 = tk_bits<float>(0xff800000u);  // kernels.rs
  for (uint v28 = tid % 4u; v28 < n; v28 += 2u) {  // kernels.rs
    float v29 = held[v28];  // kernels.rs
    if (v29 > r1) {  // kernels.rs
      r1 = v29;  // kernels.rs
    } else {
      if (v29 < -1.0f) {  // kernels.rs
        r1 = r1 + 0.25f;  // kernels.rs
      } else {
        r0[1u] = v29;  // kernels.rs
      }
    }
  }
  __syncwarp();  // kernels.rs
  float v43 = r1;  // kernels.rs
  r1 = 3.0f;  // kernels.rs
  if (v43 == tk_bits<float>(0xff800000u)) {  // kernels.rs
    r1 = 0.0f;  // kernels.rs
  }
  x[tid] = r1 + max(v43, -100.0f) + r0[1u] + held[63u - tid];  // kernels.rs
}

// hand_over: mode row, grid [groups, 1, 1], 32 threads, 32 bytes shared
//   x: f32 buffer, in
//   partial: f32 buffer, inout
//   arrived: u32 buffer, inout
//   extremes: i32 buffer, inout
//   y: f32 buffer, inout
extern "C" __global__ void __launch_bounds__(32) hand_over(const float* x, float* partial, uint* arrived, int* extremes, float* y) {
  const uint lane = threadIdx.x & 31u;
  __shared__ __align__(16) uint last[1];
  __shared__ __align__(16) uint counts[4];
  float r0;
  tk_grid_trigger();  // kernels.rs
  tk_grid_wait();  // kernels.rs
  float v6 = tk_simd_sum(tk_coherent(x + (blockIdx.x * 32u + lane)));  // kernels.rs
  if (lane < 4u) {  // kernels.rs
    counts[lane] = 0u;  // kernels.rs
  }
  __syncthreads();  // kernels.rs
  atomicAdd(counts + lane % 4u, 1u);  // kernels.rs
  __syncthreads();  // kernels.rs
  if (lane == 0u) {  // kernels.rs
    partial[blockIdx.x] = v6;  // kernels.rs
    __threadfence();  // kernels.rs
    uint v23 = atomicAdd(arrived, 1u);  // kernels.rs
    last[0u] = v23;
    atomicMax(extremes, tk_i32(v6 * 100.0f));  // kernels.rs
    atomicMin(extremes + 1u, tk_i32(v6 * 100.0f));  // kernels.rs
    atomicExch(arrived + 1u, counts[3u]);  // kernels.rs
    atomicAdd(y + 1u, v6);  // kernels.rs
    __threadfence();  // kernels.rs
  }
  __syncthreads();  // kernels.rs
  if (last[0u] == gridDim.x - 1u) {  // kernels.rs
    r0 = 0.0f;  // kernels.rs
    for (uint v52 = 0u; v52 < gridDim.x; ++v52) {  // kernels.rs
      r0 = r0 + tk_coherent(partial + v52);  // kernels.rs
    }
    if (lane == 0u) {  // kernels.rs
      y[0u] = r0;  // kernels.rs
    }
  }
}

// copies: mode row, grid [groups, 1, 1], 64 threads, 2816 bytes shared
//   x: f16 buffer, in
//   z: f32 buffer, in
//   y: f32 buffer, out
//   n: u32 argument
extern "C" __global__ void __launch_bounds__(64) copies(const f16* __restrict__ x, const float* __restrict__ z, float* y, uint n) {
  const uint tid = threadIdx.x;
  __shared__ __align__(16) f16 wide[1024];
  __shared__ __align__(16) float small[192];
  float r0;
  r0 = 0.0f;  // kernels.rs
  tk_copy_async<16>(wide + tid * 8u, x + tid * 8u, true);  // kernels.rs
  tk_copy_async<4>(small + tid, z + tid, true);  // kernels.rs
  tk_copy_async<8>(small + (tid * 2u + 64u), z + tid * 2u, tid < n);  // kernels.rs
  tk_copy_commit();  // kernels.rs
  for (uint v18 = 0u; v18 < 4u; ++v18) {  // kernels.rs
    uint v20 = v18 + 1u;  // kernels.rs
    tk_copy_async<16>(wide + (v20 % 2u * 512u + tid * 8u), x + (v20 * 512u + tid * 8u), v20 < 4u);  // kernels.rs
    tk_copy_commit();  // kernels.rs
    tk_copy_wait<1>();  // kernels.rs
    __syncthreads();  // kernels.rs
    uint4 v44 = *(const uint4*)(wide + (v18 % 2u * 512u + (63u - tid) * 8u));  // kernels.rs
    r0 = r0 + tk_f32(tk_part<f16>(v44.x, 0));  // kernels.rs
    r0 = r0 + tk_f32(tk_part<f16>(v44.x, 1));
    r0 = r0 + tk_f32(tk_part<f16>(v44.y, 0));
    r0 = r0 + tk_f32(tk_part<f16>(v44.y, 1));
    r0 = r0 + tk_f32(tk_part<f16>(v44.z, 0));
    r0 = r0 + tk_f32(tk_part<f16>(v44.z, 1));
    r0 = r0 + tk_f32(tk_part<f16>(v44.w, 0));
    r0 = r0 + tk_f32(tk_part<f16>(v44.w, 1));
    __syncthreads();  // kernels.rs
  }
  tk_copy_wait<0>();  // kernels.rs
  __syncthreads();  // kernels.rs
  y[tid] = r0 + small[63u - tid] + small[191u - tid];  // kernels.rs
}

// product_bf16: mode tile, grid [1, 1, 1], 32 threads, 1536 bytes shared
//   a: bf16 buffer, in
//   b: bf16 buffer, in
//   c: f32 buffer, in
//   y: bf16 buffer, out
//   z: f32 buffer, out
//   depth: u32 constant
//   requires depth divisible by 16
//   requires b aligned to 16
//   requires z aligned to 16
template <uint depth>
__device__ __forceinline__ void product_bf16(const bf16* __restrict__ a, const bf16* __restrict__ b, const float* __restrict__ c, bf16* y, float* z) {
  const uint lane = threadIdx.x & 31u;
  __shared__ __align__(16) bf16 left[384];
  __shared__ __align__(16) bf16 right[384];
  tk_frag<float, 8> r0[2];
  tk_frag<float, 8> v2; TK_EACH(8) v2[e] = 0.0f;  // kernels.rs
  r0[0u] = v2;
  r0[1u] = v2;
  tk_frag<float, 8> v6; TK_EACH(8) v6[e] = 1.0f;  // kernels.rs
  r0[1u] = v6;
  for (uint v12 = 0u; v12 < depth; v12 += 16u) {  // kernels.rs
    TK_UNROLL  // kernels.rs
    for (uint v16 = 0u; v16 < 8u; ++v16) {
      uint v19 = v16 * 32u + lane;  // kernels.rs
      uint v21 = v19 / 16u;  // kernels.rs
      uint v23 = v19 % 16u;
      left[v21 * 24u + v23] = a[v21 * depth + v12 + v23];  // kernels.rs
      right[v23 * 24u + v21] = b[v21 * depth + v12 + v23];  // kernels.rs
    }
    __syncthreads();  // kernels.rs
    tk_operand v40 = tk_load_a_rows<false>(left, 24u);  // kernels.rs
    tk_operand v43 = tk_load_b<true, true>(b + v12, depth);  // kernels.rs
    r0[0u] = tk_mma_bf16(v40, v43, r0[0u]);
    tk_operand v50 = tk_load_b_rows<false>(right, 24u);  // kernels.rs
    r0[1u] = tk_mma_bf16(v40, v50, r0[1u]);
    tk_operand v53 = tk_load_a<false, false>(a + v12, depth);  // kernels.rs
    tk_operand v56 = tk_load_b_rows<false>(right, 24u);  // kernels.rs
    r0[1u] = tk_mma_bf16(v53, v56, r0[1u]);  // kernels.rs
    __syncthreads();  // kernels.rs
  }
  tk_frag<bf16, 8> v63; TK_EACH(8) v63[e] = bf16(r0[0u][e]);  // kernels.rs
  tk_store_c<false>(y, 16u, v63);
  tk_frag<float, 8> v70 = tk_load_c<false>(c, 16u);  // kernels.rs
  tk_frag<float, 8> v71; TK_EACH(8) v71[e] = r0[1u][e] + v70[e];
  tk_store_c<true>(z, 16u, v71);
}

// attention_f16: mode tile, grid [1, 1, 1], 32 threads, 512 bytes shared
//   q: f16 buffer, in
//   k: f16 buffer, in
//   v: f16 buffer, in
//   y: f32 buffer, out
//   limit: u32 argument
//   scale: f32 argument
extern "C" __global__ void __launch_bounds__(32) attention_f16(const f16* __restrict__ q, const f16* __restrict__ k, const f16* __restrict__ v, float* y, uint limit, float scale) {
  const uint lane = threadIdx.x & 31u;
  __shared__ __align__(16) f16 values[256];
  tk_frag<float, 2> r0;
  for (uint v5 = 0u; v5 < 8u; ++v5) {  // kernels.rs
    values[v5 * 32u + lane] = v[v5 * 32u + lane];  // kernels.rs
  }
  __syncthreads();  // kernels.rs
  tk_frag<float, 8> v16; TK_EACH(8) v16[e] = 0.0f;  // kernels.rs
  tk_operand v19 = tk_load_a<false, false>(q, 16u);
  tk_operand v22 = tk_load_b<true, false>(k, 16u);
  tk_frag<float, 8> v23 = tk_mma_f16(v19, v22, v16);
  tk_frag<uint, 8> v25; TK_EACH(8) v25[e] = tk_tile_col(lane, e);  // kernels.rs
  tk_frag<float, 8> v34; TK_EACH(8) v34[e] = v25[e] <= tk_tile_row(lane, e) && v25[e] < limit ? v23[e] * scale : tk_bits<float>(0xff800000u);  // kernels.rs
  tk_frag<float, 2> v36; TK_EACH(2) v36[e] = -1e30f;  // kernels.rs
  r0 = v36;
  tk_frag<float, 2> v40 = tk_row_max(v34);  // kernels.rs
  tk_frag<float, 2> v41; TK_EACH(2) v41[e] = max(r0[e], v40[e]);
  r0 = v41;  // kernels.rs
  tk_frag<float, 8> v45; TK_EACH(8) v45[e] = expf(v34[e] - v41[e / 2 % 2]);  // kernels.rs
  tk_frag<float, 2> v46 = tk_row_sum(v45);  // kernels.rs
  tk_frag<float, 8> v48; TK_EACH(8) v48[e] = 0.0f;  // kernels.rs
  tk_operand v49 = tk_to_left_f16(v45);
  tk_operand v52 = tk_load_b_rows<false>(values, 16u);
  tk_frag<float, 8> v53 = tk_mma_f16(v49, v52, v48);
  tk_frag<float, 8> v55; TK_EACH(8) v55[e] = v53[e] / v46[e / 2 % 2];  // kernels.rs
  tk_store_c<false>(y, 16u, v55);
}

#if !defined(TILE_SHIM) && !defined(TK_WGMMA_BF16_2)
#define TK_WGMMA_BF16_2
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products of warpgroups need compute capability 9.0: compile for sm_90a"
#endif
#define TK_SUMS "{%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15}"
#define TK_STEP "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " TK_SUMS ", a, b, p, 1, 1, 0, 0;\n"
#define TK_NEXT "add.s64 a, a, 2; add.s64 b, b, 2;\n"
TK_INLINE void tk_wgmma_bf16(tk_frag<float, 8> (&c)[2], const bf16* a, const bf16* b) {
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %18, 0; mov.b64 a, %16; mov.b64 b, %17;\n"
      TK_STEP TK_NEXT TK_STEP TK_NEXT TK_STEP TK_NEXT TK_STEP "}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[0][4]), "+f"(c[0][5]), "+f"(c[0][6]), "+f"(c[0][7]),
        "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[1][4]), "+f"(c[1][5]), "+f"(c[1][6]), "+f"(c[1][7])
      : "l"(tk_block(a)), "l"(tk_block(b)), "r"(1)
      : "memory");
}
#undef TK_SUMS
#undef TK_STEP
#undef TK_NEXT
#endif
#if !defined(TILE_SHIM) && !defined(TK_WGMMA_BF16_1)
#define TK_WGMMA_BF16_1
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products of warpgroups need compute capability 9.0: compile for sm_90a"
#endif
#define TK_SUMS "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define TK_STEP "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " TK_SUMS ", a, b, p, 1, 1, 0, 0;\n"
#define TK_NEXT "add.s64 a, a, 2; add.s64 b, b, 2;\n"
TK_INLINE void tk_wgmma_bf16(tk_frag<float, 8>& c, const bf16* a, const bf16* b) {
  asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %10, 0; mov.b64 a, %8; mov.b64 b, %9;\n"
      TK_STEP TK_NEXT TK_STEP TK_NEXT TK_STEP TK_NEXT TK_STEP "}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "l"(tk_block(a)), "l"(tk_block(b)), "r"(1)
      : "memory");
}
#undef TK_SUMS
#undef TK_STEP
#undef TK_NEXT
#endif
#if !defined(TILE_SHIM) && !defined(TK_WGMMA_OF_BF16_2)
#define TK_WGMMA_OF_BF16_2
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products of warpgroups need compute capability 9.0: compile for sm_90a"
#endif
#define TK_SUMS "{%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15}"
#define TK_STEP(a) "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " TK_SUMS ", " a ", b, p, 1, 1, 0;\n"
#define TK_NEXT "add.s64 b, b, 2;\n"
TK_INLINE void tk_wgmma_of_bf16(tk_frag<float, 8> (&c)[2], const tk_operand& a0, const tk_operand& a1, const tk_operand& a2, const tk_operand& a3, const bf16* b) {
  asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %33, 0; mov.b64 b, %32;\n"
      TK_STEP("{%16, %17, %18, %19}") TK_NEXT
      TK_STEP("{%20, %21, %22, %23}") TK_NEXT
      TK_STEP("{%24, %25, %26, %27}") TK_NEXT
      TK_STEP("{%28, %29, %30, %31}") "}"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[0][4]), "+f"(c[0][5]), "+f"(c[0][6]), "+f"(c[0][7]),
        "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[1][4]), "+f"(c[1][5]), "+f"(c[1][6]), "+f"(c[1][7])
      : "r"(a0.word[0]), "r"(a0.word[1]), "r"(a0.word[2]), "r"(a0.word[3]), "r"(a1.word[0]), "r"(a1.word[1]), "r"(a1.word[2]), "r"(a1.word[3]), "r"(a2.word[0]), "r"(a2.word[1]), "r"(a2.word[2]), "r"(a2.word[3]), "r"(a3.word[0]), "r"(a3.word[1]), "r"(a3.word[2]), "r"(a3.word[3]), "l"(tk_block(b)), "r"(1)
      : "memory");
}
#undef TK_SUMS
#undef TK_STEP
#undef TK_NEXT
#endif
// warpgroups: mode tile, grid [1, 1, 1], 256 threads, 22528 bytes shared
//   a: bf16 buffer, in
//   b: bf16 buffer, in
//   y: f32 buffer, out
//   requires compute capability 9.0: sm_90a
extern "C" __global__ void __launch_bounds__(256) warpgroups(const bf16* __restrict__ a, const bf16* __restrict__ b, float* y) {
  const uint tid = threadIdx.x;
  const uint lane = threadIdx.x & 31u;
  const uint simd = threadIdx.x >> 5;
  __shared__ __align__(1024) bf16 left[8192];
  __shared__ __align__(1024) bf16 right[3072];
  tk_frag<float, 8> r0[2];
  tk_frag<float, 8> r1;
  uint v2 = tid / 8u;  // kernels.rs
  uint v5 = tid % 8u;
  uint v10 = (v5 ^ (v2 % 8u)) * 8u;  // kernels.rs
  for (uint v14 = 0u; v14 < 4u; ++v14) {  // kernels.rs
    uint v19 = (v14 * 32u + v2) * 64u;  // kernels.rs
    tk_copy_async<16>(left + (v19 + v10), a + (v19 + v5 * 8u), true);  // kernels.rs
    if (v14 * 32u + v2 < 48u) {  // kernels.rs
      tk_copy_async<16>(right + (v19 + v10), b + (v19 + v5 * 8u), true);  // kernels.rs
    }
  }
  tk_copy_commit();  // kernels.rs
  tk_copy_wait<0>();  // kernels.rs
  tk_async_fence();  // kernels.rs
  __syncthreads();  // kernels.rs
  tk_frag<float, 8> v34; TK_EACH(8) v34[e] = 0.0f;  // kernels.rs
  r0[0u] = v34;
  r0[1u] = v34;
  tk_frag<float, 8> v38; TK_EACH(8) v38[e] = 1.0f;
  r1 = v38;
  tk_hold(r0); tk_hold(r1); tk_wgmma_fence();  // kernels.rs
  uint v44 = simd / 4u * 4096u;  // kernels.rs
  tk_wgmma_bf16(r0, left + v44, right);  // kernels.rs
  tk_wgmma_commit();  // kernels.rs
  tk_wgmma_bf16(r1, left + v44, right + 2048u);  // kernels.rs
  tk_wgmma_commit();  // kernels.rs
  tk_wgmma_wait<1>(); tk_hold(r0); tk_hold(r1);  // kernels.rs
  uint v51 = simd * 16u * 48u;  // kernels.rs
  tk_store_c<false>(y + v51, 48u, r0[0u]);  // kernels.rs
  tk_store_c<false>(y + (v51 + 16u), 48u, r0[1u]);  // kernels.rs
  tk_operand v62 = tk_operand_of(tid, v44, v51, tid);  // kernels.rs
  tk_hold(r0); tk_hold(r1); tk_wgmma_fence();  // kernels.rs
  tk_wgmma_of_bf16(r0, v62, v62, v62, v62, right);  // kernels.rs
  tk_wgmma_commit();  // kernels.rs
  tk_wgmma_wait<0>(); tk_hold(r0); tk_hold(r1);  // kernels.rs
  tk_store_c<false>(y + (v51 + 32u), 48u, r1);  // kernels.rs
}

// words_f16: mode tile, grid [1, 1, 1], 32 threads
//   x: f32 buffer, in
//   y: f32 buffer, out
extern "C" __global__ void __launch_bounds__(32) words_f16(const float* __restrict__ x, float* y) {
  const uint lane = threadIdx.x & 31u;
  uint v4 = 0u + lane * 2u;  // kernels.rs
  uint v14 = 64u + lane * 2u;
  uint v24 = 128u + lane * 2u;
  uint v34 = 192u + lane * 2u;
  tk_operand v40 = tk_operand_of(tk_f16x2_from(x[v4], x[v4 + 1u]), tk_f16x2_from(x[v14], x[v14 + 1u]), tk_f16x2_from(x[v24], x[v24 + 1u]), tk_f16x2_from(x[v34], x[v34 + 1u]));  // kernels.rs
  uint v45 = 256u + lane * 2u;  // kernels.rs
  uint v55 = 320u + lane * 2u;
  uint v65 = 384u + lane * 2u;
  uint v75 = 448u + lane * 2u;
  tk_operand v81 = tk_operand_of(tk_f16x2_from(x[v45], x[v45 + 1u]), tk_f16x2_from(x[v55], x[v55 + 1u]), tk_f16x2_from(x[v65], x[v65 + 1u]), tk_f16x2_from(x[v75], x[v75 + 1u]));  // kernels.rs
  tk_frag<float, 8> v83; TK_EACH(8) v83[e] = 0.0f;  // kernels.rs
  tk_frag<float, 8> v84 = tk_mma_f16(v40, v81, v83);
  tk_store_c<false>(y, 16u, v84);
}

// words_bf16: mode tile, grid [1, 1, 1], 32 threads
//   x: f32 buffer, in
//   y: f32 buffer, out
extern "C" __global__ void __launch_bounds__(32) words_bf16(const float* __restrict__ x, float* y) {
  const uint lane = threadIdx.x & 31u;
  uint v4 = 0u + lane * 2u;  // kernels.rs
  uint v14 = 64u + lane * 2u;
  uint v24 = 128u + lane * 2u;
  uint v34 = 192u + lane * 2u;
  tk_operand v40 = tk_operand_of(tk_bf16x2_from(x[v4], x[v4 + 1u]), tk_bf16x2_from(x[v14], x[v14 + 1u]), tk_bf16x2_from(x[v24], x[v24 + 1u]), tk_bf16x2_from(x[v34], x[v34 + 1u]));  // kernels.rs
  uint v45 = 256u + lane * 2u;  // kernels.rs
  uint v55 = 320u + lane * 2u;
  uint v65 = 384u + lane * 2u;
  uint v75 = 448u + lane * 2u;
  tk_operand v81 = tk_operand_of(tk_bf16x2_from(x[v45], x[v45 + 1u]), tk_bf16x2_from(x[v55], x[v55 + 1u]), tk_bf16x2_from(x[v65], x[v65 + 1u]), tk_bf16x2_from(x[v75], x[v75 + 1u]));  // kernels.rs
  tk_frag<float, 8> v83; TK_EACH(8) v83[e] = 0.0f;  // kernels.rs
  tk_frag<float, 8> v84 = tk_mma_bf16(v40, v81, v83);
  tk_store_c<false>(y, 16u, v84);
}

// rms_norm_f16_group256: mode row, grid [rows, 1, 1], 256 threads, 32 bytes shared
//   x: f16 buffer, in
//   weight: f16 buffer, in
//   y: f16 buffer, out
//   width: u32 constant
//   eps: f32 constant
//   requires width divisible by 8
constant uint rms_norm_f16_group256_width [[function_constant(0)]];
constant float rms_norm_f16_group256_eps [[function_constant(1)]];
[[max_total_threads_per_threadgroup(256)]]
kernel void rms_norm_f16_group256(
    device const half* x [[buffer(0)]],
    device const half* weight [[buffer(1)]],
    device half* y [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  const uint width = rms_norm_f16_group256_width;
  const float eps = rms_norm_f16_group256_eps;
  alignas(16) threadgroup float shared0[8];
  float r0;
  uint v3 = group.x * width;  // kernels.rs
  r0 = 0.0f;  // kernels.rs
  for (uint v9 = tid; v9 < width; v9 += 256u) {  // kernels.rs
    float v12 = float(x[v3 + v9]);  // kernels.rs
    r0 = r0 + v12 * v12;  // kernels.rs
  }
  float v20 = simd_sum(r0);  // kernels.rs
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0u) {
    shared0[simd] = v20;  // dsl.rs
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // kernels.rs
  float v41 = shared0[0u] + shared0[1u] + shared0[2u] + shared0[3u] + shared0[4u] + shared0[5u];
  float v51 = precise::rsqrt((v41 + shared0[6u] + shared0[7u]) / float(width) + eps);
  for (uint v55 = tid; v55 < width; v55 += 256u) {  // kernels.rs
    y[v3 + v55] = half(float(x[v3 + v55]) * v51 * float(weight[v55]));  // kernels.rs
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
[[max_total_threads_per_threadgroup(32)]]
kernel void numbers(
    device const float* a [[buffer(0)]],
    device const int* b [[buffer(1)]],
    device const uint* c [[buffer(2)]],
    device float* y [[buffer(3)]],
    device int* z [[buffer(4)]],
    device uint* w [[buffer(5)]],
    constant float& by [[buffer(6)]],
    constant int& shift [[buffer(7)]],
    uint tid [[thread_index_in_threadgroup]]) {
  float v3 = a[tid];  // kernels.rs
  float v6 = a[tid + 32u];
  float v9 = fabs(v3) + 0.5f;  // kernels.rs
  y[tid + 0u] = -v3;  // kernels.rs
  y[tid + 32u] = v9;
  y[tid + 64u] = precise::exp(v3);
  y[tid + 96u] = precise::exp2(v3);
  y[tid + 128u] = precise::log(v9);
  y[tid + 160u] = precise::log2(v9);
  y[tid + 192u] = precise::sin(v3);
  y[tid + 224u] = precise::cos(v3);
  y[tid + 256u] = precise::tanh(v3);
  y[tid + 288u] = precise::sqrt(v9);
  y[tid + 320u] = precise::rsqrt(v9);
  y[tid + 352u] = floor(v3);
  y[tid + 384u] = ceil(v3);
  y[tid + 416u] = rint(v3);
  y[tid + 448u] = v3 + v6;
  y[tid + 480u] = v3 - v6;
  y[tid + 512u] = v3 * v6;
  y[tid + 544u] = v3 / v9;
  y[tid + 576u] = min(v3, v6);
  y[tid + 608u] = max(v3, v6);
  y[tid + 640u] = fma(v3, v6, by);
  y[tid + 672u] = v3 - (v6 - by);
  y[tid + 704u] = v3 / (v9 / 2.0f);
  y[tid + 736u] = - -v3;
  y[tid + 768u] = (v3 + v6) * (v3 - v6);
  y[tid + 800u] = min(max(v3, -INFINITY), INFINITY);
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
  w[tid + 32u] = uint(popcount(v183));
  w[tid + 64u] = uint(clz(v183));
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
  w[tid + 480u] = mulhi(v183, v186);
  w[tid + 512u] = v183 > v186 ? v183 : 7u;
  w[tid + 544u] = v183 != v186 ? v186 : 4294967295u;
  w[tid + 576u] = v183 - (v186 - 3u);
  w[tid + 608u] = v183 / (v190 % 4u + 1u);
  w[tid + 640u] = ((v183 & 3u) << 4u) | (v186 >> 28u);
  w[tid + 672u] = (uint(popcount(v183)) - uint(popcount(v186))) >> 1u;
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
[[max_total_threads_per_threadgroup(32)]]
kernel void casts(
    device const float* x [[buffer(0)]],
    device half* h [[buffer(1)]],
    device bfloat* r [[buffer(2)]],
    device char* s [[buffer(3)]],
    device uchar* u [[buffer(4)]],
    device short* m [[buffer(5)]],
    device ushort* n [[buffer(6)]],
    device int* i [[buffer(7)]],
    device uint* w [[buffer(8)]],
    device float* f [[buffer(9)]],
    uint tid [[thread_index_in_threadgroup]]) {
  float v1 = x[tid];  // kernels.rs
  h[tid] = half(v1);  // kernels.rs
  r[tid] = bfloat(v1);  // kernels.rs
  s[tid] = tk_i8(v1);  // kernels.rs
  u[tid] = tk_u8(v1);  // kernels.rs
  m[tid] = tk_i16(v1);  // kernels.rs
  n[tid] = tk_u16(v1);  // kernels.rs
  i[tid] = tk_i32(v1);  // kernels.rs
  w[tid] = tk_u32(v1);  // kernels.rs
  float v23 = float(h[tid]) + float(r[tid]) + float(s[tid]) + float(u[tid]) + float(m[tid]);  // kernels.rs
  f[tid] = v23 + float(n[tid]);  // kernels.rs
  f[tid + 32u] = float(i[tid]) + float(w[tid]);  // kernels.rs
  int v43 = int(uint(int(uint(int(s[tid])) + uint(int(m[tid])))) + uint(int(u[tid])));  // kernels.rs
  i[tid + 32u] = int(uint(v43) + uint(int(n[tid])));
  uint v60 = (uint(s[tid]) ^ uint(as_type<ushort>(h[tid]))) ^ (uint(as_type<ushort>(r[tid])) << 16u);  // kernels.rs
  w[tid + 32u] = v60;
  h[tid + 32u] = half(float(i[tid]));  // kernels.rs
  s[tid + 32u] = char(i[tid]);  // kernels.rs
  u[tid + 32u] = uchar(w[tid]);  // kernels.rs
  m[tid + 32u] = short(i[tid]);  // kernels.rs
  n[tid + 32u] = ushort(w[tid]);  // kernels.rs
  r[tid + 32u] = bfloat(float(h[tid]));  // kernels.rs
  w[tid + 64u] = (as_type<uint>(v1) ^ as_type<uint>(i[tid])) ^ uint(v1 != 0.0f);  // kernels.rs
  f[tid + 64u] = float(as_type<int>(w[tid + 64u]) != 0);  // kernels.rs
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
[[max_total_threads_per_threadgroup(32)]]
kernel void vectors(
    device const half* a [[buffer(0)]],
    device const char* b [[buffer(1)]],
    device const uchar* c [[buffer(2)]],
    device const bfloat* d [[buffer(3)]],
    device const float* e_ [[buffer(4)]],
    device float* y [[buffer(5)]],
    device half* h [[buffer(6)]],
    device char* g [[buffer(7)]],
    device bfloat* k [[buffer(8)]],
    uint tid [[thread_index_in_threadgroup]]) {
  float r0;
  r0 = 0.0f;  // kernels.rs
  uint4 v5 = *(device const uint4*)(a + tid * 8u);  // kernels.rs
  r0 = r0 + float(as_type<half2>(v5.x).x);  // kernels.rs
  r0 = r0 + float(as_type<half2>(v5.x).y);
  r0 = r0 + float(as_type<half2>(v5.y).x);
  r0 = r0 + float(as_type<half2>(v5.y).y);
  r0 = r0 + float(as_type<half2>(v5.z).x);
  r0 = r0 + float(as_type<half2>(v5.z).y);
  r0 = r0 + float(as_type<half2>(v5.w).x);
  r0 = r0 + float(as_type<half2>(v5.w).y);
  uint4 v56 = *(device const uint4*)(b + tid * 16u);  // kernels.rs
  r0 = r0 + float(as_type<char4>(v56.x).x);  // kernels.rs
  r0 = r0 + float(as_type<char4>(v56.x).y);
  r0 = r0 + float(as_type<char4>(v56.x).z);
  r0 = r0 + float(as_type<char4>(v56.x).w);
  r0 = r0 + float(as_type<char4>(v56.y).x);
  r0 = r0 + float(as_type<char4>(v56.y).y);
  r0 = r0 + float(as_type<char4>(v56.y).z);
  r0 = r0 + float(as_type<char4>(v56.y).w);
  r0 = r0 + float(as_type<char4>(v56.z).x);
  r0 = r0 + float(as_type<char4>(v56.z).y);
  r0 = r0 + float(as_type<char4>(v56.z).z);
  r0 = r0 + float(as_type<char4>(v56.z).w);
  r0 = r0 + float(as_type<char4>(v56.w).x);
  r0 = r0 + float(as_type<char4>(v56.w).y);
  r0 = r0 + float(as_type<char4>(v56.w).z);
  r0 = r0 + float(as_type<char4>(v56.w).w);
  uchar4 v155 = *(device const uchar4*)(c + tid * 4u);  // kernels.rs
  r0 = r0 + float(v155.x);  // kernels.rs
  r0 = r0 + float(v155.y);
  r0 = r0 + float(v155.z);
  r0 = r0 + float(v155.w);
  bfloat2 v182 = *(device const bfloat2*)(d + tid * 2u);  // kernels.rs
  r0 = r0 + float(v182.x);  // kernels.rs
  r0 = r0 + float(v182.y);
  float4 v197 = *(device const float4*)(e_ + tid * 4u);  // kernels.rs
  r0 = r0 + v197.x;  // kernels.rs
  r0 = r0 + v197.y;
  r0 = r0 + v197.z;
  r0 = r0 + v197.w;
  bfloat4 v220 = *(device const bfloat4*)(d + tid * 4u);  // kernels.rs
  r0 = r0 + float(v220.x);  // kernels.rs
  r0 = r0 + float(v220.y);
  r0 = r0 + float(v220.z);
  r0 = r0 + float(v220.w);
  char2 v249 = *(device const char2*)(b + tid * 2u);  // kernels.rs
  r0 = r0 + (float(a[tid]) + float(v249.y));
  *(device float4*)(y + tid * 4u) = float4(r0, v197.w, v197.z, v197.y);  // kernels.rs
  uint4 v266 = *(device const uint4*)(a + tid * 8u);  // kernels.rs
  uint4 v277 = uint4(as_type<uint>(half2(as_type<half2>(v266.w).y, as_type<half2>(v266.w).x)), as_type<uint>(half2(as_type<half2>(v266.z).y, as_type<half2>(v266.z).x)), as_type<uint>(half2(as_type<half2>(v266.y).y, as_type<half2>(v266.y).x)), as_type<uint>(half2(as_type<half2>(v266.x).y, as_type<half2>(v266.x).x)));  // kernels.rs
  *(device uint4*)(h + tid * 8u) = v277;
  uint4 v280 = *(device const uint4*)(b + tid * 16u);  // kernels.rs
  uint4 v299 = uint4(as_type<uint>(char4(as_type<char4>(v280.w).w, as_type<char4>(v280.w).z, as_type<char4>(v280.w).y, as_type<char4>(v280.w).x)), as_type<uint>(char4(as_type<char4>(v280.z).w, as_type<char4>(v280.z).z, as_type<char4>(v280.z).y, as_type<char4>(v280.z).x)), as_type<uint>(char4(as_type<char4>(v280.y).w, as_type<char4>(v280.y).z, as_type<char4>(v280.y).y, as_type<char4>(v280.y).x)), as_type<uint>(char4(as_type<char4>(v280.x).w, as_type<char4>(v280.x).z, as_type<char4>(v280.x).y, as_type<char4>(v280.x).x)));  // kernels.rs
  *(device uint4*)(g + tid * 16u) = v299;
  *(device bfloat2*)(k + tid * 2u) = bfloat2(bfloat(v197.x), bfloat(v197.y));  // kernels.rs
}

// lanes: mode element, grid [2, 1, 1], 64 threads
//   x: f32 buffer, in
//   n: u32 buffer, in
//   y: f32 buffer, out
//   m: u32 buffer, out
//   s: i32 buffer, out
[[max_total_threads_per_threadgroup(64)]]
kernel void lanes(
    device const float* x [[buffer(0)]],
    device const uint* n [[buffer(1)]],
    device float* y [[buffer(2)]],
    device uint* m [[buffer(3)]],
    device int* s [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  uint v4 = group.x * 64u + tid;  // kernels.rs
  float v5 = x[v4];  // kernels.rs
  uint v6 = n[v4];
  float v7 = simd_sum(v5);  // kernels.rs
  y[v4] = v7;
  float v10 = simd_max(v5);  // kernels.rs
  y[v4 + 128u] = v10;
  float v13 = simd_min(v5);  // kernels.rs
  y[v4 + 256u] = v13;
  float v19 = simd_shuffle(v5, ushort(lane ^ 5u));  // kernels.rs
  y[v4 + 384u] = v19;
  float v22 = simd_shuffle_xor(v5, ushort(16));  // kernels.rs
  y[v4 + 512u] = v22;
  uint v23 = simd_sum(v6);  // kernels.rs
  m[v4] = v23;
  uint v26 = simd_max(v6);  // kernels.rs
  m[v4 + 128u] = v26;
  uint v29 = simd_prefix_exclusive_sum(v6);  // kernels.rs
  m[v4 + 256u] = v29;
  uint v34 = tk_ballot(v5 > 0.0f);  // kernels.rs
  m[v4 + 384u] = v34;
  bool v39 = simd_any(v5 > 0.9f);  // kernels.rs
  bool v45 = simd_all(v5 > -0.9f);
  m[v4 + 512u] = (v39 ? 1u : 0u) + (v45 ? 2u : 0u);  // kernels.rs
  m[v4 + 640u] = groups.x * simd;  // kernels.rs
  int v55 = as_type<int>(v6);  // kernels.rs
  int v56 = int(simd_sum(uint(v55)));  // kernels.rs
  s[v4] = v56;
  int v59 = simd_min(v55);  // kernels.rs
  s[v4 + 128u] = v59;
  int v62 = int(simd_prefix_exclusive_sum(uint(v55)));  // kernels.rs
  s[v4 + 256u] = v62;
}

// control: mode element, grid [1, 1, 1], 64 threads, 256 bytes shared
//   x: f32 buffer, inout
//   n: u32 argument
[[max_total_threads_per_threadgroup(64)]]
kernel void control(
    device float* x [[buffer(0)]],
    constant uint& n [[buffer(1)]],
    uint tid [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup float held[64];
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
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // kernels.rs
  r1 = -INFINITY;  // kernels.rs
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
  simdgroup_barrier(mem_flags::mem_threadgroup);  // kernels.rs
  float v43 = r1;  // kernels.rs
  r1 = 3.0f;  // kernels.rs
  if (v43 == -INFINITY) {  // kernels.rs
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
[[max_total_threads_per_threadgroup(32)]]
kernel void hand_over(
    device const float* x [[buffer(0)]],
    TK_COHERENT device float* partial [[buffer(1)]],
    device uint* arrived [[buffer(2)]],
    device int* extremes [[buffer(3)]],
    device float* y [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  alignas(16) threadgroup uint last[1];
  alignas(16) threadgroup uint counts[4];
  float r0;
  float v6 = simd_sum(x[group.x * 32u + lane]);  // kernels.rs
  if (lane < 4u) {  // kernels.rs
    counts[lane] = 0u;  // kernels.rs
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // kernels.rs
  atomic_fetch_add_explicit((threadgroup atomic_uint*)(counts + lane % 4u), 1u, memory_order_relaxed);  // kernels.rs
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // kernels.rs
  if (lane == 0u) {  // kernels.rs
    partial[group.x] = v6;  // kernels.rs
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);  // kernels.rs
    uint v23 = atomic_fetch_add_explicit((device atomic_uint*)(arrived), 1u, memory_order_relaxed);  // kernels.rs
    last[0u] = v23;
    atomic_fetch_max_explicit((device atomic_int*)(extremes), tk_i32(v6 * 100.0f), memory_order_relaxed);  // kernels.rs
    atomic_fetch_min_explicit((device atomic_int*)(extremes + 1u), tk_i32(v6 * 100.0f), memory_order_relaxed);  // kernels.rs
    atomic_exchange_explicit((device atomic_uint*)(arrived + 1u), counts[3u], memory_order_relaxed);  // kernels.rs
    atomic_fetch_add_explicit((device atomic_float*)(y + 1u), v6, memory_order_relaxed);  // kernels.rs
    atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);  // kernels.rs
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // kernels.rs
  if (last[0u] == groups.x - 1u) {  // kernels.rs
    r0 = 0.0f;  // kernels.rs
    for (uint v52 = 0u; v52 < groups.x; ++v52) {  // kernels.rs
      r0 = r0 + partial[v52];  // kernels.rs
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
[[max_total_threads_per_threadgroup(64)]]
kernel void copies(
    device const half* x [[buffer(0)]],
    device const float* z [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant uint& n [[buffer(3)]],
    uint tid [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup half wide[1024];
  alignas(16) threadgroup float small[192];
  float r0;
  r0 = 0.0f;  // kernels.rs
  tk_copy((threadgroup uint4*)(wide + tid * 8u), (device const uint4*)(x + tid * 8u), true);  // kernels.rs
  tk_copy((threadgroup uint*)(small + tid), (device const uint*)(z + tid), true);  // kernels.rs
  tk_copy((threadgroup uint2*)(small + (tid * 2u + 64u)), (device const uint2*)(z + tid * 2u), tid < n);  // kernels.rs
  for (uint v18 = 0u; v18 < 4u; ++v18) {  // kernels.rs
    uint v20 = v18 + 1u;  // kernels.rs
    tk_copy((threadgroup uint4*)(wide + (v20 % 2u * 512u + tid * 8u)), (device const uint4*)(x + (v20 * 512u + tid * 8u)), v20 < 4u);  // kernels.rs
    threadgroup_barrier(mem_flags::mem_threadgroup);  // kernels.rs
    uint4 v44 = *(threadgroup const uint4*)(wide + (v18 % 2u * 512u + (63u - tid) * 8u));  // kernels.rs
    r0 = r0 + float(as_type<half2>(v44.x).x);  // kernels.rs
    r0 = r0 + float(as_type<half2>(v44.x).y);
    r0 = r0 + float(as_type<half2>(v44.y).x);
    r0 = r0 + float(as_type<half2>(v44.y).y);
    r0 = r0 + float(as_type<half2>(v44.z).x);
    r0 = r0 + float(as_type<half2>(v44.z).y);
    r0 = r0 + float(as_type<half2>(v44.w).x);
    r0 = r0 + float(as_type<half2>(v44.w).y);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // kernels.rs
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // kernels.rs
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
constant uint product_bf16_depth [[function_constant(0)]];
[[max_total_threads_per_threadgroup(32)]]
kernel void product_bf16(
    device const bfloat* a [[buffer(0)]],
    device const bfloat* b [[buffer(1)]],
    device const float* c [[buffer(2)]],
    device bfloat* y [[buffer(3)]],
    device float* z [[buffer(4)]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint depth = product_bf16_depth;
  alignas(16) threadgroup bfloat left[384];
  alignas(16) threadgroup bfloat right[384];
  float2 r0[2];
  float2 v2; TK_EACH(2) v2[e] = 0.0f;  // kernels.rs
  r0[0u] = v2;
  r0[1u] = v2;
  float2 v6; TK_EACH(2) v6[e] = 1.0f;  // kernels.rs
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
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // kernels.rs
    bfloat2 v40 = tk_tile_load<bfloat>(left, 24u);  // kernels.rs
    bfloat2 v43 = tk_tile_load_t<bfloat>(b + v12, depth);  // kernels.rs
    r0[0u] = tk_mma(v40, v43, r0[0u]);
    bfloat2 v50 = tk_tile_load<bfloat>(right, 24u);  // kernels.rs
    r0[1u] = tk_mma(v40, v50, r0[1u]);
    bfloat2 v53 = tk_tile_load<bfloat>(a + v12, depth);  // kernels.rs
    bfloat2 v56 = tk_tile_load<bfloat>(right, 24u);  // kernels.rs
    r0[1u] = tk_mma(v53, v56, r0[1u]);  // kernels.rs
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // kernels.rs
  }
  bfloat2 v63; TK_EACH(2) v63[e] = bfloat(r0[0u][e]);  // kernels.rs
  tk_tile_store(y, 16u, v63);
  float2 v70 = tk_tile_load<float>(c, 16u);  // kernels.rs
  float2 v71; TK_EACH(2) v71[e] = r0[1u][e] + v70[e];
  tk_tile_store(z, 16u, v71);
}

// attention_f16: mode tile, grid [1, 1, 1], 32 threads, 512 bytes shared
//   q: f16 buffer, in
//   k: f16 buffer, in
//   v: f16 buffer, in
//   y: f32 buffer, out
//   limit: u32 argument
//   scale: f32 argument
[[max_total_threads_per_threadgroup(32)]]
kernel void attention_f16(
    device const half* q [[buffer(0)]],
    device const half* k [[buffer(1)]],
    device const half* v [[buffer(2)]],
    device float* y [[buffer(3)]],
    constant uint& limit [[buffer(4)]],
    constant float& scale [[buffer(5)]],
    uint lane [[thread_index_in_simdgroup]]) {
  alignas(16) threadgroup half values[256];
  float r0;
  for (uint v5 = 0u; v5 < 8u; ++v5) {  // kernels.rs
    values[v5 * 32u + lane] = v[v5 * 32u + lane];  // kernels.rs
  }
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);  // kernels.rs
  float2 v16; TK_EACH(2) v16[e] = 0.0f;  // kernels.rs
  half2 v19 = tk_tile_load<half>(q, 16u);
  half2 v22 = tk_tile_load_t<half>(k, 16u);
  float2 v23 = tk_mma(v19, v22, v16);
  uint2 v25; TK_EACH(2) v25[e] = tk_tile_col(lane) + e;  // kernels.rs
  float2 v34; TK_EACH(2) v34[e] = v25[e] <= tk_tile_row(lane) && v25[e] < limit ? v23[e] * scale : -INFINITY;  // kernels.rs
  float v36 = -1e30f;  // kernels.rs
  r0 = v36;
  float v40 = tk_row_max(v34);  // kernels.rs
  float v41 = max(r0, v40);
  r0 = v41;  // kernels.rs
  float2 v45; TK_EACH(2) v45[e] = precise::exp(v34[e] - v41);  // kernels.rs
  float v46 = tk_row_sum(v45);  // kernels.rs
  float2 v48; TK_EACH(2) v48[e] = 0.0f;  // kernels.rs
  half2 v49 = half2(half(v45.x), half(v45.y));
  half2 v52 = tk_tile_load<half>(values, 16u);
  float2 v53 = tk_mma(v49, v52, v48);
  float2 v55; TK_EACH(2) v55[e] = v53[e] / v46;  // kernels.rs
  tk_tile_store(y, 16u, v55);
}

// words_f16: mode tile, grid [1, 1, 1], 32 threads
//   x: f32 buffer, in
//   y: f32 buffer, out
[[max_total_threads_per_threadgroup(32)]]
kernel void words_f16(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint lane [[thread_index_in_simdgroup]]) {
  uint v4 = 0u + lane * 2u;  // kernels.rs
  uint v14 = 64u + lane * 2u;
  uint v24 = 128u + lane * 2u;
  uint v34 = 192u + lane * 2u;
  half2 v40 = tk_left_of<half>(tk_f16x2_from(x[v4], x[v4 + 1u]), lane);  // kernels.rs
  uint v45 = 256u + lane * 2u;  // kernels.rs
  uint v55 = 320u + lane * 2u;
  uint v65 = 384u + lane * 2u;
  uint v75 = 448u + lane * 2u;
  half2 v81 = tk_right_of<half>(tk_f16x2_from(x[v45], x[v45 + 1u]), lane);  // kernels.rs
  float2 v83; TK_EACH(2) v83[e] = 0.0f;  // kernels.rs
  float2 v84 = tk_mma(v40, v81, v83);
  tk_tile_store(y, 16u, v84);
}

// words_bf16: mode tile, grid [1, 1, 1], 32 threads
//   x: f32 buffer, in
//   y: f32 buffer, out
[[max_total_threads_per_threadgroup(32)]]
kernel void words_bf16(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    uint lane [[thread_index_in_simdgroup]]) {
  uint v4 = 0u + lane * 2u;  // kernels.rs
  uint v14 = 64u + lane * 2u;
  uint v24 = 128u + lane * 2u;
  uint v34 = 192u + lane * 2u;
  bfloat2 v40 = tk_left_of<bfloat>(tk_bf16x2_from(x[v4], x[v4 + 1u]), lane);  // kernels.rs
  uint v45 = 256u + lane * 2u;  // kernels.rs
  uint v55 = 320u + lane * 2u;
  uint v65 = 384u + lane * 2u;
  uint v75 = 448u + lane * 2u;
  bfloat2 v81 = tk_right_of<bfloat>(tk_bf16x2_from(x[v45], x[v45 + 1u]), lane);  // kernels.rs
  float2 v83; TK_EACH(2) v83[e] = 0.0f;  // kernels.rs
  float2 v84 = tk_mma(v40, v81, v83);
  tk_tile_store(y, 16u, v84);
}

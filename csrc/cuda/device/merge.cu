// Output and lse of rows whose keys were taken in parts; after tile.cu.
//
//   lse = log sum_p exp lse_p        O = sum_p exp(lse_p - lse) O_p
//
// A warp has a line, and each of its threads columns of it.

KERNEL(4) merge(const TileParams p) {
  const i64 lines = (i64)p.batches * p.heads * p.query_len;
  const i64 line = (i64)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (line >= lines) {
    return;
  }
  float largest = -kInfinity, sum = 0.0f;
  for (int part = 0; part < p.parts; ++part) {
    largest = fmaxf(largest, p.part_lse[part * lines + line]);
  }
  const float from = largest == -kInfinity ? 0.0f : largest;
  for (int part = 0; part < p.parts; ++part) {
    sum += power_of_two((p.part_lse[part * lines + line] - from) * kLog2E);
  }
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int column = threadIdx.x % 32 * 2; column < VALUE_DIM; column += 64) {
    float first = 0.0f, second = 0.0f;
    for (int part = 0; part < p.parts; ++part) {
      const float weight = power_of_two((p.part_lse[part * lines + line] - from) * kLog2E) * factor;
      const float* const output = p.part_output + (part * lines + line) * VALUE_DIM + column;
      first += weight * output[0];
      second += weight * output[1];
    }
    *(u32*)(p.output + line * VALUE_DIM + column) = pack(first, second);
  }
  if (threadIdx.x % 32 == 0) {
    p.made_lse[line] = lse_of(largest, sum);
  }
}

// Where the kernels believe the parts of a chunk are: a kernel of its own, run by test_cuda.py on the CPU.
#include "exports.cu"

template <class Codec>
ZC_KERNEL offsets(const __grid_constant__ zc_job job) {
  const zc_i64 b = job.k;
  const Chunk<Codec> chunk(Codec(job.codec_in), job.pieces[0].n_elems);
  zc_i64 *const out = (zc_i64 *)job.target;
  out[0] = chunk.n_blocks();
  out[1] = chunk.scale_at(b);
  out[2] = chunk.codes_at(b);
  out[3] = chunk.present(b);
  out[4] = chunk.nbytes();
  out[5] = chunk.n_units();
  out[6] = chunk.unit_scale_at(chunk.unit_of(b));
}

// Every kernel of every codec, as templates: an instance is compiled when it is first needed, by its C++ name.
//   NVRTC: -std=c++17 -fmad=false -ftz=false -prec-div=true -arch=sm_90, and a name expression for each kernel:
//          encode<IntBlock<8, 256>, Elements<Float32>>, sum<Hadamard<NvFp4<16>>, BFloat16>
//   nvcc:  the same options with -cubin, for a file that includes this one and instantiates what it wants
//
//   encode<Codec, Source>  elements, or a sum of chunks, into chunks of Codec
//   sum<Codec, E>          chunks of Codec, one or many, into elements of type E, or a raw or cast chunk of them
//   copy                   bytes into bytes
//
// Which instance does which verb: zcomm/engines/cuda.py. A new codec is one more #include here.
#ifndef ZCOMM_EXPORTS_CU
#define ZCOMM_EXPORTS_CU

#include "carried.cuh"
#include "fp8_block_codec.cuh"
#include "hadamard_codec.cuh"
#include "int_asym_codec.cuh"
#include "int_block_codec.cuh"
#include "mx_block_codec.cuh"
#include "nvfp4_codec.cuh"

#define ZC_KERNEL __global__ void __launch_bounds__(ZC_THREADS)

template <class Codec, class Source>
ZC_KERNEL encode(const __grid_constant__ zc_job job) {
  encode_chunks<Codec, Source>(job);
}

template <class Codec, class E>
ZC_KERNEL sum(const __grid_constant__ zc_job job) {
  sum_chunks<Codec, E>(job);
}

ZC_KERNEL copy(const __grid_constant__ zc_job job) { copy_chunks(job); }

#endif

// What a launch is told, passed to every kernel by value. Field for field the same as _Job in zcomm/engines/cuda.py.
#ifndef ZCOMM_JOB_CUH
#define ZCOMM_JOB_CUH

#include "wire.h"

#define ZC_THREADS 256  // of every CTA
#define ZC_SOURCES 128  // addresses that travel in the job; more are read from a table in the device's memory
#define ZC_PIECES 32    // pieces of one launch

// One chunk of a launch: elements that lie in one place, and the bytes they come from or go to.
struct zc_piece {
  zc_i64 source;      // bytes behind every source
  zc_i64 target;      // bytes behind the target
  zc_i64 n_elems;     // at least 1
  zc_i64 drawn;       // elements between the draw's first and this chunk's
  zc_i64 first_unit;  // this launch does its units from here on
  zc_i64 first_task;  // tasks of the pieces before this one
};

// What a codec's struct is constructed from.
struct zc_settings {
  zc_i32 bits, block;
};

struct zc_job {
  const zc_u8 *sources[ZC_SOURCES];  // what is encoded, decoded or added: k of them
  const zc_u8 *const *more_sources;  // all k, if k > ZC_SOURCES
  zc_u8 *target;
  double factor, divisor;     // what becomes of a sum: multiplied, then divided, unless 1
  zc_u64 seed, call, first;   // the draw, for a codec that rounds by chance
  zc_i64 k;
  zc_i64 n_tasks;  // of all pieces; a task is a unit of the codec
  zc_settings codec_in, codec_out;  // of the chunks that are read, of the chunk that is written
  zc_i32 team, block_team;  // threads that share a task, or a block of it, where the codec's block is not a constant
  zc_i32 pads;              // whether the target is a chunk of elements, padded with zeros
  zc_i32 n_pieces;
  zc_piece pieces[ZC_PIECES];
};

#endif

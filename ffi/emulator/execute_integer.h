// Decoders that several families share.
#pragma once

#include "decode.h"

namespace emulator {

// An instruction found by its whole spelling in the table of lane loops (add.s32, selp.f32, mov.b64 ...).
bool decode_lanes(Decoder&);
void decode_integer(Decoder&);      // with the forms on predicates and with carries
void decode_predicate_move(Decoder&);
void decode_packed_setp(Decoder&);  // setp.f16x2, in execute_float.cc
bool decode_float(Decoder&);        // false when the last type is no float

}  // namespace emulator

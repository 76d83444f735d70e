// All ops for one instruction set. Compiled once per variant with -DKVERN_ISA=name and its -m flags; no
// standard C++ headers, whose inline functions could leak one variant's instructions into another.
#include "abi.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"

#define TEXT(x) #x
#define NAME(x) TEXT(x)

namespace kvern {
namespace KVERN_ISA {
extern const Ops ops;
const Ops ops = {NAME(KVERN_ISA), ::KVERN_ISA::linear, ::KVERN_ISA::attention, ::KVERN_ISA::rope_and_store,
                 ::KVERN_ISA::norm, ::KVERN_ISA::gate};
}  // namespace KVERN_ISA
}  // namespace kvern

// Everything that a kernel's source may use without an include; g++ includes it first.
#pragma once

#include "arithmetic.h"
#include "atomics.h"
#include "collectives.h"
#include "language.h"
#include "launch.h"

// All that a kernel's source may name without including anything; g++ is told to include it first.
#pragma once

#include "arithmetic.h"
#include "atomics.h"
#include "collectives.h"
#include "language.h"
#include "launch.h"

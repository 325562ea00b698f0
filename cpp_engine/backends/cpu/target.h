// POCKET_TARGET_BEGIN("avx2,fma") ... POCKET_TARGET_END: functions between them are compiled for an instruction set. Standard headers stay outside, so that
// what other files share with this one is not. Lambdas in between would escape Clang's form of it: there are none.
#pragma once

#define POCKET_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define POCKET_TARGET_BEGIN(features) POCKET_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define POCKET_TARGET_END POCKET_PRAGMA(clang attribute pop)
#else
#define POCKET_TARGET_BEGIN(features) POCKET_PRAGMA(GCC push_options) POCKET_PRAGMA(GCC target(features))
#define POCKET_TARGET_END POCKET_PRAGMA(GCC pop_options)
#endif

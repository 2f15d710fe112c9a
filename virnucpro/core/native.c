/* The digest of the sources from which the library was built; core/native.py compares it. */

#ifndef SOURCE_SHA256
#define SOURCE_SHA256 ""
#endif

const char source_sha256[] = SOURCE_SHA256;

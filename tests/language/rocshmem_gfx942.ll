; Functions with rocSHMEM's names and signatures, for cross-compile tests on machines without ROCm. Each stores its number, and its
; arguments, so that no call is optimised away; nothing here communicates.
target triple = "amdgcn-amd-amdhsa"
@last = weak addrspace(1) externally_initialized global i32 0
@argument = weak addrspace(1) externally_initialized global i64 0

define i32 @rocshmem_my_pe() {
  store volatile i32 1001, ptr addrspace(1) @last
  %v = load volatile i32, ptr addrspace(1) @last
  ret i32 %v
}

define i32 @rocshmem_n_pes() {
  store volatile i32 1002, ptr addrspace(1) @last
  %v = load volatile i32, ptr addrspace(1) @last
  ret i32 %v
}

define ptr @rocshmem_ptr(ptr %a0, i32 %a1) {
  store volatile i32 1003, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile i32 %a1, ptr addrspace(1) @argument
  ret ptr %a0
}

define void @rocshmem_getmem(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1004, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_getmem_wave(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1005, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_getmem_wg(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1006, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_getmem_nbi(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1007, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_getmem_nbi_wave(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1008, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_getmem_nbi_wg(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1009, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1010, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_wave(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1011, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_wg(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1012, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_nbi(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1013, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_nbi_wave(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1014, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_nbi_wg(ptr %a0, ptr %a1, i64 %a2, i32 %a3) {
  store volatile i32 1015, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile i32 %a3, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_signal(ptr %a0, ptr %a1, i64 %a2, ptr %a3, i64 %a4, i32 %a5, i32 %a6) {
  store volatile i32 1016, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile ptr %a3, ptr addrspace(1) @argument
  store volatile i64 %a4, ptr addrspace(1) @argument
  store volatile i32 %a5, ptr addrspace(1) @argument
  store volatile i32 %a6, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_signal_wave(ptr %a0, ptr %a1, i64 %a2, ptr %a3, i64 %a4, i32 %a5, i32 %a6) {
  store volatile i32 1017, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile ptr %a3, ptr addrspace(1) @argument
  store volatile i64 %a4, ptr addrspace(1) @argument
  store volatile i32 %a5, ptr addrspace(1) @argument
  store volatile i32 %a6, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_signal_wg(ptr %a0, ptr %a1, i64 %a2, ptr %a3, i64 %a4, i32 %a5, i32 %a6) {
  store volatile i32 1018, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile ptr %a3, ptr addrspace(1) @argument
  store volatile i64 %a4, ptr addrspace(1) @argument
  store volatile i32 %a5, ptr addrspace(1) @argument
  store volatile i32 %a6, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_signal_nbi(ptr %a0, ptr %a1, i64 %a2, ptr %a3, i64 %a4, i32 %a5, i32 %a6) {
  store volatile i32 1019, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile ptr %a3, ptr addrspace(1) @argument
  store volatile i64 %a4, ptr addrspace(1) @argument
  store volatile i32 %a5, ptr addrspace(1) @argument
  store volatile i32 %a6, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_signal_nbi_wave(ptr %a0, ptr %a1, i64 %a2, ptr %a3, i64 %a4, i32 %a5, i32 %a6) {
  store volatile i32 1020, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile ptr %a3, ptr addrspace(1) @argument
  store volatile i64 %a4, ptr addrspace(1) @argument
  store volatile i32 %a5, ptr addrspace(1) @argument
  store volatile i32 %a6, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_putmem_signal_nbi_wg(ptr %a0, ptr %a1, i64 %a2, ptr %a3, i64 %a4, i32 %a5, i32 %a6) {
  store volatile i32 1021, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile ptr %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  store volatile ptr %a3, ptr addrspace(1) @argument
  store volatile i64 %a4, ptr addrspace(1) @argument
  store volatile i32 %a5, ptr addrspace(1) @argument
  store volatile i32 %a6, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_uint64_atomic_set(ptr %a0, i64 %a1, i32 %a2) {
  store volatile i32 1022, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile i64 %a1, ptr addrspace(1) @argument
  store volatile i32 %a2, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_uint64_atomic_add(ptr %a0, i64 %a1, i32 %a2) {
  store volatile i32 1023, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile i64 %a1, ptr addrspace(1) @argument
  store volatile i32 %a2, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_uint64_wait_until(ptr %a0, i32 %a1, i64 %a2) {
  store volatile i32 1024, ptr addrspace(1) @last
  store volatile ptr %a0, ptr addrspace(1) @argument
  store volatile i32 %a1, ptr addrspace(1) @argument
  store volatile i64 %a2, ptr addrspace(1) @argument
  ret void
}

define void @rocshmem_fence() {
  store volatile i32 1025, ptr addrspace(1) @last
  ret void
}

define void @rocshmem_quiet() {
  store volatile i32 1026, ptr addrspace(1) @last
  ret void
}

define void @rocshmem_barrier_all() {
  store volatile i32 1027, ptr addrspace(1) @last
  ret void
}

define void @rocshmem_barrier_all_wave() {
  store volatile i32 1028, ptr addrspace(1) @last
  ret void
}

define void @rocshmem_barrier_all_wg() {
  store volatile i32 1029, ptr addrspace(1) @last
  ret void
}

define void @rocshmem_sync_all() {
  store volatile i32 1030, ptr addrspace(1) @last
  ret void
}

define void @rocshmem_sync_all_wave() {
  store volatile i32 1031, ptr addrspace(1) @last
  ret void
}

define void @rocshmem_sync_all_wg() {
  store volatile i32 1032, ptr addrspace(1) @last
  ret void
}

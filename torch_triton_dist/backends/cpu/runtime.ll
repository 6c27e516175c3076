; Runtime of the CPU backend: launches, a thread pool, polling, a clock. Built once with Triton's LLVM and kept in its cache.
;
; A launch descriptor (made by driver.py, constant) is an array of i64:
;   0 address of the kernel's ttd_programs, 1 bytes of scratch memory a program needs, 2 number n of parameters,
;   3 number of arguments with constexprs, 4 kernel name (char*), then for each parameter: its kind and its position among the
;   arguments with constexprs. Kinds: 0 pointer, 1 integer, 2 fp16, 3 bf16, 4 fp32, 5 fp64.

%Job = type { ptr, ptr, i64, i64, i64, ptr, i64, i64, ptr, ptr, i64 }
; 0 programs function, 1 arguments, 2 programs, 3 chunk, 4 scratch bytes, 5 next program of each range (%Next, atomic), 6 helpers wanted,
; 7 helpers inside, 8 message of a failed assertion (atomic), 9 next job, 10 ranges
;
; Programs are cut into as many ranges as threads are wanted. A thread begins with the range of its number, so that what programs of the
; last launch have left in its caches is found by those of the next; then it helps with the others, one after the other. The caller goes
; through them from the first, so a program may wait for programs before it.

%Next = type { i64, [7 x i64] }            ; a cache line

@lock = internal global [64 x i8] zeroinitializer, align 64   ; pthread_mutex_t
@work = internal global [64 x i8] zeroinitializer, align 64   ; pthread_cond_t: a job wants helpers
@left = internal global [64 x i8] zeroinitializer, align 64   ; pthread_cond_t: a helper has left its job
@jobs = internal global ptr null
@workers = internal global i64 0
@spare = internal global ptr null          ; scratch memory of the last launch: its size, then (64 bytes on) the memory itself
@threads = internal global ptr null        ; Python callable: number of threads
@data_ptr = internal global ptr null       ; the Python string "data_ptr"
@none = internal global ptr null
@int_type = internal global ptr null
@error_type = internal global ptr null
@type_error = internal global ptr null
@value_error = internal global ptr null
@is_cpu = internal global ptr null         ; the Python string "is_cpu"
@count_message = internal constant [64 x i8] c"kernel %s on cpu: takes %lld arguments (%lld with constexprs)\00\00\00"
@device_message = internal constant [77 x i8] c"kernel %s on cpu: argument %lld is a tensor on device %S; move it to the cpu\00"
@memory_message = internal constant [76 x i8] c"kernel %s on cpu: argument %lld is a tensor without memory (a fake tensor?)\00"
@numel = internal constant [6 x i8] c"numel\00"
@device = internal constant [7 x i8] c"device\00"
@failed_message = internal constant [21 x i8] c"kernel %s on cpu: %s\00"

declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare i32 @madvise(ptr, i64, i32)
declare void @abort() noreturn
declare i32 @sched_yield()
declare i32 @nanosleep(ptr, ptr)
declare i32 @clock_gettime(i32, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare ptr @PyErr_Format(ptr, ptr, ...)
declare ptr @PyErr_Occurred()
declare void @PyErr_Clear()
declare ptr @PyObject_GetAttr(ptr, ptr)
declare ptr @PyObject_GetAttrString(ptr, ptr)
declare i32 @PyObject_IsTrue(ptr)
declare i64 @PyLong_AsUnsignedLongLongMask(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyObject_Type(ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare ptr @PyObject_CallMethodObjArgs(ptr, ptr, ...)
declare ptr @PyObject_CallMethod(ptr, ptr, ptr, ...)
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...)
declare ptr @PyLong_AsVoidPtr(ptr)

; ---- threads

define internal void @pause(i32 %count) {
entry:
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %n, %loop ]
  call void asm sideeffect "PAUSE", "~{memory}"()
  %n = add i32 %i, 1
  %c = icmp slt i32 %n, %count
  br i1 %c, label %loop, label %done
done:
  ret void
}

; Scratch memory of a thread, at least %bytes: %slot holds its address and size.
define internal ptr @scratch(ptr %slot, i64 %bytes) {
entry:
  %psize = getelementptr i8, ptr %slot, i64 8
  %size = load i64, ptr %psize
  %old = load ptr, ptr %slot
  %enough = icmp sle i64 %bytes, %size
  br i1 %enough, label %have, label %grow
have:
  ret ptr %old
grow:
  call void @free(ptr %old)
  %large = icmp sge i64 %bytes, 131072   ; worth a huge page (2 MiB), with which translations of addresses are seldom missed
  %page = select i1 %large, i64 2097152, i64 4096
  %mask = sub i64 %page, 1
  %up = add i64 %bytes, %mask
  %keep = sub i64 0, %page
  %rounded = and i64 %up, %keep
  %new = call ptr @aligned_alloc(i64 %page, i64 %rounded)
  %null = icmp eq ptr %new, null
  br i1 %null, label %fail, label %ok
fail:
  call void @abort()
  unreachable
ok:
  br i1 %large, label %huge, label %note
huge:
  %advice = call i32 @madvise(ptr %new, i64 %rounded, i32 14)   ; MADV_HUGEPAGE; without it the memory is as good as before
  br label %note
note:
  store ptr %new, ptr %slot
  store i64 %rounded, ptr %psize
  ret ptr %new
}

; The first program of range number %range.
define internal i64 @range_begin(i64 %range, i64 %total, i64 %ranges) alwaysinline {
  %scaled = mul i64 %range, %total
  %begin = udiv i64 %scaled, %ranges
  ret i64 %begin
}

; Takes chunks of programs until none is left, first those of range %range.
define internal void @run(ptr %job, ptr %arena, i64 %range) {
entry:
  %pbody = getelementptr %Job, ptr %job, i32 0, i32 0
  %body = load ptr, ptr %pbody
  %pargs = getelementptr %Job, ptr %job, i32 0, i32 1
  %args = load ptr, ptr %pargs
  %ptotal = getelementptr %Job, ptr %job, i32 0, i32 2
  %total = load i64, ptr %ptotal
  %pchunk = getelementptr %Job, ptr %job, i32 0, i32 3
  %chunk = load i64, ptr %pchunk
  %pall = getelementptr %Job, ptr %job, i32 0, i32 5
  %all = load ptr, ptr %pall
  %pmessage = getelementptr %Job, ptr %job, i32 0, i32 8
  %pranges = getelementptr %Job, ptr %job, i32 0, i32 10
  %ranges = load i64, ptr %pranges
  br label %enter
enter:
  %seen = phi i64 [ 0, %entry ], [ %more, %exhausted ]
  %moved = add i64 %range, %seen
  %here = urem i64 %moved, %ranges
  %following = add i64 %here, 1
  %limit = call i64 @range_begin(i64 %following, i64 %total, i64 %ranges)
  %pnext = getelementptr %Next, ptr %all, i64 %here
  br label %take
take:
  %begin = atomicrmw add ptr %pnext, i64 %chunk monotonic
  %none = icmp sge i64 %begin, %limit
  br i1 %none, label %exhausted, label %some
some:
  %given_up = load atomic ptr, ptr %pmessage monotonic, align 8
  %sound = icmp eq ptr %given_up, null
  br i1 %sound, label %call, label %done
call:
  %stop = add i64 %begin, %chunk
  %end = call i64 @llvm.smin.i64(i64 %stop, i64 %limit)
  %message = call ptr %body(ptr %args, i64 %begin, i64 %end, ptr %arena)
  %fine = icmp eq ptr %message, null
  br i1 %fine, label %take, label %failed
exhausted:
  %more = add i64 %seen, 1
  %any = icmp ult i64 %more, %ranges
  br i1 %any, label %enter, label %done
failed:
  store atomic ptr %message, ptr %pmessage monotonic, align 8
  br label %done
done:
  ret void
}
declare i64 @llvm.smin.i64(i64, i64)

; %number: from 1.
define internal ptr @worker(ptr %number) {
entry:
  %range = ptrtoint ptr %number to i64
  %slot = alloca [2 x i64], align 16
  store [2 x i64] zeroinitializer, ptr %slot
  br label %idle
idle:                                    ; a launch often follows the last one at once: look out for it for a while, some 100 us
  %spins = phi i32 [ 0, %entry ], [ 0, %finished ], [ %more, %spin ], [ %more, %give ]
  %more = add i32 %spins, 1
  %any = load atomic ptr, ptr @jobs acquire, align 8
  %quiet = icmp eq ptr %any, null
  br i1 %quiet, label %linger, label %enter
linger:
  %busy = icmp slt i32 %spins, 200
  br i1 %busy, label %spin, label %later
spin:
  call void @pause(i32 2)
  br label %idle
later:                                   ; torch's own threads may want this core
  %patient = icmp slt i32 %spins, 500
  br i1 %patient, label %give, label %enter
give:
  %y = call i32 @sched_yield()
  br label %idle
enter:
  %l = call i32 @pthread_mutex_lock(ptr @lock)
  br label %search
search:
  %first = load ptr, ptr @jobs
  br label %look
look:
  %job = phi ptr [ %first, %search ], [ %following, %skip ]
  %last = icmp eq ptr %job, null
  br i1 %last, label %wait, label %check
check:
  %pwanted = getelementptr %Job, ptr %job, i32 0, i32 6
  %wanted = load i64, ptr %pwanted
  %take = icmp sgt i64 %wanted, 0
  br i1 %take, label %join, label %skip
skip:
  %pfollowing = getelementptr %Job, ptr %job, i32 0, i32 9
  %following = load ptr, ptr %pfollowing
  br label %look
wait:
  %w = call i32 @pthread_cond_wait(ptr @work, ptr @lock)
  br label %search
join:
  %fewer = sub i64 %wanted, 1
  store i64 %fewer, ptr %pwanted
  %phelpers = getelementptr %Job, ptr %job, i32 0, i32 7
  %before = load i64, ptr %phelpers
  %one_more = add i64 %before, 1
  store atomic i64 %one_more, ptr %phelpers monotonic, align 8
  %u = call i32 @pthread_mutex_unlock(ptr @lock)
  %pbytes = getelementptr %Job, ptr %job, i32 0, i32 4
  %bytes = load i64, ptr %pbytes
  %arena = call ptr @scratch(ptr %slot, i64 %bytes)
  call void @run(ptr %job, ptr %arena, i64 %range)
  %l2 = call i32 @pthread_mutex_lock(ptr @lock)
  %inside = load i64, ptr %phelpers
  %rest = sub i64 %inside, 1
  store atomic i64 %rest, ptr %phelpers release, align 8
  %b = call i32 @pthread_cond_broadcast(ptr @left)
  %u2 = call i32 @pthread_mutex_unlock(ptr @lock)
  br label %finished
finished:
  br label %idle
}

; Runs a job on the calling thread and its helpers.
define internal void @share(ptr %job, ptr %arena) {
entry:
  %thread = alloca i64
  %l = call i32 @pthread_mutex_lock(ptr @lock)
  %pwanted = getelementptr %Job, ptr %job, i32 0, i32 6
  %wanted = load i64, ptr %pwanted
  br label %hire
hire:
  %have = load i64, ptr @workers
  %enough = icmp sge i64 %have, %wanted
  br i1 %enough, label %post, label %create
create:
  %plus = add i64 %have, 1
  %number = inttoptr i64 %plus to ptr
  %failed = call i32 @pthread_create(ptr %thread, ptr null, ptr @worker, ptr %number)
  %bad = icmp ne i32 %failed, 0          ; fewer threads: slower, still right
  br i1 %bad, label %post, label %created
created:
  %id = load i64, ptr %thread
  %d = call i32 @pthread_detach(i64 %id)
  store i64 %plus, ptr @workers
  br label %hire
post:
  %head = load ptr, ptr @jobs
  %plink = getelementptr %Job, ptr %job, i32 0, i32 9
  store ptr %head, ptr %plink
  store atomic ptr %job, ptr @jobs release, align 8
  %b = call i32 @pthread_cond_broadcast(ptr @work)
  %u = call i32 @pthread_mutex_unlock(ptr @lock)
  call void @run(ptr %job, ptr %arena, i64 0)
  %l2 = call i32 @pthread_mutex_lock(ptr @lock)
  store i64 0, ptr %pwanted
  br label %unlink
unlink:                                  ; the address of the link that leads to our job
  %plead = phi ptr [ @jobs, %post ], [ %pnext, %other ]
  %lead = load ptr, ptr %plead
  %ours = icmp eq ptr %lead, %job
  br i1 %ours, label %remove, label %other
other:
  %pnext = getelementptr %Job, ptr %lead, i32 0, i32 9
  br label %unlink
remove:
  %next = load ptr, ptr %plink
  store atomic ptr %next, ptr %plead release, align 8
  %phelpers = getelementptr %Job, ptr %job, i32 0, i32 7
  %u2 = call i32 @pthread_mutex_unlock(ptr @lock)
  br label %spin
spin:                                    ; helpers mostly finish at about the same time
  %spins = phi i32 [ 0, %remove ], [ %n, %again ]
  %busy = load atomic i64, ptr %phelpers acquire, align 8
  %idle = icmp eq i64 %busy, 0
  br i1 %idle, label %settle, label %again
again:
  call void @pause(i32 2)
  %n = add i32 %spins, 1
  %patient = icmp slt i32 %n, 400
  br i1 %patient, label %spin, label %settle
settle:                                  ; a helper that has just counted itself out still holds the lock for a moment
  %l3 = call i32 @pthread_mutex_lock(ptr @lock)
  br label %waiting
waiting:
  %helpers = load i64, ptr %phelpers
  %alone = icmp eq i64 %helpers, 0
  br i1 %alone, label %done, label %sleep
sleep:
  %w = call i32 @pthread_cond_wait(ptr @left, ptr @lock)
  br label %waiting
done:
  %u3 = call i32 @pthread_mutex_unlock(ptr @lock)
  ret void
}

; In a forked child: the workers are gone, and a lock may have been held.
define void @ttd_cpu_after_fork() {
  store [64 x i8] zeroinitializer, ptr @lock
  store [64 x i8] zeroinitializer, ptr @work
  store [64 x i8] zeroinitializer, ptr @left
  store ptr null, ptr @jobs
  store i64 0, ptr @workers
  ret void
}

; Called before each look of a loop that waits for memory to change. Peers may need this very core to make progress.
define void @ttd_cpu_poll(ptr %polls) {
entry:
  %nap = alloca [2 x i64]
  %n = load i32, ptr %polls
  %more = add i32 %n, 1
  store i32 %more, ptr %polls
  %first = icmp eq i32 %n, 0
  br i1 %first, label %done, label %again
again:
  %early = icmp ult i32 %n, 32
  br i1 %early, label %short, label %later
short:
  call void @pause(i32 1)
  br label %done
later:
  %soon = icmp ult i32 %n, 4096
  br i1 %soon, label %give, label %rest
give:
  %y = call i32 @sched_yield()
  br label %done
rest:
  store [2 x i64] [i64 0, i64 20000], ptr %nap
  %s = call i32 @nanosleep(ptr %nap, ptr null)
  br label %done
done:
  ret void
}

define i64 @ttd_clock_ns() {
  %now = alloca [2 x i64]
  %c = call i32 @clock_gettime(i32 1, ptr %now)
  %seconds = load i64, ptr %now
  %pnanos = getelementptr i8, ptr %now, i64 8
  %nanos = load i64, ptr %pnanos
  %s = mul i64 %seconds, 1000000000
  %sum = add i64 %s, %nanos
  ret i64 %sum
}

; ---- launches from Python

; Objects that launches need: the function that returns the number of threads, "data_ptr", "is_cpu", None, int, RuntimeError,
; TypeError, ValueError.
define void @ttd_cpu_setup(ptr %threads, ptr %data_ptr, ptr %is_cpu, ptr %none, ptr %int, ptr %error, ptr %type_error, ptr %value_error) {
  store ptr %is_cpu, ptr @is_cpu
  store ptr %value_error, ptr @value_error
  store ptr %threads, ptr @threads
  store ptr %data_ptr, ptr @data_ptr
  store ptr %none, ptr @none
  store ptr %int, ptr @int_type
  store ptr %error, ptr @error_type
  store ptr %type_error, ptr @type_error
  ret void
}

; 8 bytes of an argument of a kind. On failure a Python exception is set; it names the kernel and the number of the argument.
define internal i64 @convert(ptr %object, i64 %kind, ptr %kernel, i64 %position) {
entry:
  switch i64 %kind, label %integer [ i64 0, label %pointer
    i64 2, label %number
    i64 3, label %number
    i64 4, label %number
    i64 5, label %number ]
integer:
  %int = call i64 @PyLong_AsUnsignedLongLongMask(ptr %object)
  ret i64 %int
pointer:
  %pnone = load ptr, ptr @none
  %is_none = icmp eq ptr %object, %pnone
  br i1 %is_none, label %null, label %typed
null:
  ret i64 0
typed:
  %type = call ptr @PyObject_Type(ptr %object)
  call void @Py_DecRef(ptr %type)
  %inttype = load ptr, ptr @int_type
  %is_int = icmp eq ptr %type, %inttype
  br i1 %is_int, label %integer, label %tensor
tensor:
  %pis_cpu = load ptr, ptr @is_cpu
  %local = call ptr @PyObject_GetAttr(ptr %object, ptr %pis_cpu)
  %unknown = icmp eq ptr %local, null
  br i1 %unknown, label %trusted, label %known
trusted:                                 ; not one of torch's tensors
  call void @PyErr_Clear()
  br label %ask
known:
  %here = call i32 @PyObject_IsTrue(ptr %local)
  call void @Py_DecRef(ptr %local)
  %elsewhere = icmp ne i32 %here, 1
  br i1 %elsewhere, label %abroad, label %ask
abroad:
  %where = call ptr @PyObject_GetAttrString(ptr %object, ptr @device)
  %nowhere = icmp eq ptr %where, null
  br i1 %nowhere, label %null, label %refuse
refuse:
  %ve = load ptr, ptr @value_error
  %e = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %ve, ptr @device_message, ptr %kernel, i64 %position, ptr %where)
  call void @Py_DecRef(ptr %where)
  br label %null
ask:
  %name = load ptr, ptr @data_ptr
  %result = call ptr (ptr, ptr, ...) @PyObject_CallMethodObjArgs(ptr %object, ptr %name, ptr null)
  %bad = icmp eq ptr %result, null
  br i1 %bad, label %null, label %address
address:
  %value = call i64 @PyLong_AsUnsignedLongLongMask(ptr %result)
  call void @Py_DecRef(ptr %result)
  %zero = icmp eq i64 %value, 0
  br i1 %zero, label %nothing, label %given
given:
  ret i64 %value
nothing:                                 ; right for a tensor without elements
  %numel = call ptr (ptr, ptr, ptr, ...) @PyObject_CallMethod(ptr %object, ptr @numel, ptr null)
  %uncounted = icmp eq ptr %numel, null
  br i1 %uncounted, label %forget, label %counted
forget:
  call void @PyErr_Clear()
  ret i64 0
counted:
  %elements = call i32 @PyObject_IsTrue(ptr %numel)
  call void @Py_DecRef(ptr %numel)
  %missing = icmp eq i32 %elements, 1
  br i1 %missing, label %fake, label %null
fake:
  %ve2 = load ptr, ptr @value_error
  %e2 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %ve2, ptr @memory_message, ptr %kernel, i64 %position)
  ret i64 0
number:
  %double = call double @PyFloat_AsDouble(ptr %object)
  %float = fptrunc double %double to float
  switch i64 %kind, label %d [ i64 2, label %h
    i64 3, label %b
    i64 4, label %f ]
d:
  %dbits = bitcast double %double to i64
  ret i64 %dbits
f:
  %fbits = bitcast float %float to i32
  %fwide = zext i32 %fbits to i64
  ret i64 %fwide
h:
  %half = fptrunc float %float to half
  %hbits = bitcast half %half to i16
  %hwide = zext i16 %hbits to i64
  ret i64 %hwide
b:
  %bits = bitcast float %float to i32
  %shifted = lshr i32 %bits, 16
  %odd = and i32 %shifted, 1
  %half_up = add i32 %odd, 32767
  %up = add i32 %bits, %half_up
  %rounded = lshr i32 %up, 16
  %quiet = or i32 %shifted, 64
  %nan = fcmp uno float %float, %float
  %chosen = select i1 %nan, i32 %quiet, i32 %rounded
  %bwide = zext i32 %chosen to i64
  ret i64 %bwide
}

; A Python function with positional arguments: grid x, y, z, stream, function, kernel metadata, launch metadata, enter hook, exit
; hook, then the kernel's arguments, with or without constexprs. Its self is the address of a launch descriptor (an int).
define ptr @ttd_cpu_launch(ptr %self, ptr %arguments, i64 %count) {
entry:
  %job = alloca %Job, align 16
  %slot = alloca [2 x i64], align 16
  store [2 x i64] zeroinitializer, ptr %slot
  %descriptor = call ptr @PyLong_AsVoidPtr(ptr %self)
  %body = load ptr, ptr %descriptor
  %parena = getelementptr i64, ptr %descriptor, i64 1
  %arena_bytes = load i64, ptr %parena
  %pparams = getelementptr i64, ptr %descriptor, i64 2
  %params = load i64, ptr %pparams
  %pall = getelementptr i64, ptr %descriptor, i64 3
  %all = load i64, ptr %pall
  %pname = getelementptr i64, ptr %descriptor, i64 4
  %name = load ptr, ptr %pname
  %table = getelementptr i64, ptr %descriptor, i64 5
  %given = sub i64 %count, 9
  %whole = icmp eq i64 %given, %all
  %short = icmp eq i64 %given, %params
  %right = or i1 %whole, %short
  br i1 %right, label %begin, label %miscounted
miscounted:
  %te = load ptr, ptr @type_error
  %e0 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %te, ptr @count_message, ptr %name, i64 %params, i64 %all)
  ret ptr null
begin:
  %slots = add i64 %params, 3
  %args = alloca i64, i64 %slots, align 16
  %gx = load ptr, ptr %arguments
  %x = call i64 @PyLong_AsLongLong(ptr %gx)
  store i64 %x, ptr %args
  %pgy = getelementptr ptr, ptr %arguments, i64 1
  %gy = load ptr, ptr %pgy
  %y = call i64 @PyLong_AsLongLong(ptr %gy)
  %py = getelementptr i64, ptr %args, i64 1
  store i64 %y, ptr %py
  %pgz = getelementptr ptr, ptr %arguments, i64 2
  %gz = load ptr, ptr %pgz
  %z = call i64 @PyLong_AsLongLong(ptr %gz)
  %pz = getelementptr i64, ptr %args, i64 2
  store i64 %z, ptr %pz
  %values = getelementptr ptr, ptr %arguments, i64 9
  %misfit = call ptr @PyErr_Occurred()   ; a grid of something else than integers
  %gridless = icmp ne ptr %misfit, null
  br i1 %gridless, label %raise, label %next
next:
  %k = phi i64 [ 0, %begin ], [ %k1, %fine_one ]
  %all_done = icmp sge i64 %k, %params
  br i1 %all_done, label %hook, label %one
one:
  %twice = mul i64 %k, 2
  %pkind = getelementptr i64, ptr %table, i64 %twice
  %kind = load i64, ptr %pkind
  %pplace = getelementptr i64, ptr %pkind, i64 1
  %place = load i64, ptr %pplace
  %where = select i1 %whole, i64 %place, i64 %k
  %pobject = getelementptr ptr, ptr %values, i64 %where
  %object = load ptr, ptr %pobject
  %value = call i64 @convert(ptr %object, i64 %kind, ptr %name, i64 %k)
  %target = add i64 %k, 3
  %ptarget = getelementptr i64, ptr %args, i64 %target
  store i64 %value, ptr %ptarget
  %problem = call ptr @PyErr_Occurred()  ; before any more Python code runs
  %refused = icmp ne ptr %problem, null
  br i1 %refused, label %raise, label %fine_one
fine_one:
  %k1 = add i64 %k, 1
  br label %next
raise:
  ret ptr null
hook:
  %none = load ptr, ptr @none
  %penter = getelementptr ptr, ptr %arguments, i64 7
  %enter = load ptr, ptr %penter
  %pmeta = getelementptr ptr, ptr %arguments, i64 6
  %meta = load ptr, ptr %pmeta
  %no_enter = icmp eq ptr %enter, %none
  br i1 %no_enter, label %size, label %call_enter
call_enter:
  %entered = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %enter, ptr %meta, ptr null)
  %enter_failed = icmp eq ptr %entered, null
  br i1 %enter_failed, label %raise, label %drop_enter
drop_enter:
  call void @Py_DecRef(ptr %entered)
  br label %size
size:
  %xy = mul i64 %x, %y
  %programs = mul i64 %xy, %z
  %empty = icmp sle i64 %programs, 0
  br i1 %empty, label %leave, label %prepare
prepare:
  %single = icmp eq i64 %programs, 1
  br i1 %single, label %sized, label %ask
ask:
  %callable = load ptr, ptr @threads
  %answer = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %callable, ptr null)
  %no_answer = icmp eq ptr %answer, null
  br i1 %no_answer, label %raise, label %answered
answered:
  %number = call i64 @PyLong_AsLongLong(ptr %answer)
  call void @Py_DecRef(ptr %answer)
  br label %sized
sized:
  %asked = phi i64 [ 1, %prepare ], [ %number, %answered ]
  %threads = call i64 @llvm.smin.i64(i64 %asked, i64 %programs)
  %shared = icmp sgt i64 %threads, 1
  %parts = mul i64 %threads, 16          ; a few chunks a thread: balance without contention
  %safe = select i1 %shared, i64 %parts, i64 1
  %share = sdiv i64 %programs, %safe
  %tiny = icmp slt i64 %share, 1
  %chunk = select i1 %tiny, i64 1, i64 %share
  %wanted = sub i64 %threads, 1
  store %Job zeroinitializer, ptr %job
  store ptr %body, ptr %job
  %j1 = getelementptr %Job, ptr %job, i32 0, i32 1
  store ptr %args, ptr %j1
  %j2 = getelementptr %Job, ptr %job, i32 0, i32 2
  store i64 %programs, ptr %j2
  %j3 = getelementptr %Job, ptr %job, i32 0, i32 3
  store i64 %chunk, ptr %j3
  %j4 = getelementptr %Job, ptr %job, i32 0, i32 4
  store i64 %arena_bytes, ptr %j4
  %j6 = getelementptr %Job, ptr %job, i32 0, i32 6
  store i64 %wanted, ptr %j6
  %single_thread = icmp slt i64 %threads, 1
  %ranges = select i1 %single_thread, i64 1, i64 %threads
  %nexts = alloca %Next, i64 %ranges, align 64
  %j5 = getelementptr %Job, ptr %job, i32 0, i32 5
  store ptr %nexts, ptr %j5
  %j10 = getelementptr %Job, ptr %job, i32 0, i32 10
  store i64 %ranges, ptr %j10
  br label %cut
cut:
  %range = phi i64 [ 0, %sized ], [ %range1, %cut ]
  %from = call i64 @range_begin(i64 %range, i64 %programs, i64 %ranges)
  %pfrom = getelementptr %Next, ptr %nexts, i64 %range
  store i64 %from, ptr %pfrom
  %range1 = add i64 %range, 1
  %uncut = icmp ult i64 %range1, %ranges
  br i1 %uncut, label %cut, label %run
run:
  %state = call ptr @PyEval_SaveThread()
  %kept = atomicrmw xchg ptr @spare, ptr null acquire   ; fresh memory would have to be mapped page by page
  %any_kept = icmp ne ptr %kept, null
  br i1 %any_kept, label %reuse, label %get
reuse:
  %kept_size = load i64, ptr %kept
  store ptr %kept, ptr %slot
  %pslot_size = getelementptr i8, ptr %slot, i64 8
  store i64 %kept_size, ptr %pslot_size
  br label %get
get:
  %need = add i64 %arena_bytes, 64
  %block = call ptr @scratch(ptr %slot, i64 %need)
  %arena = getelementptr i8, ptr %block, i64 64
  br i1 %shared, label %together, label %alone
together:
  call void @share(ptr %job, ptr %arena)
  br label %finished
alone:
  call void @run(ptr %job, ptr %arena, i64 0)
  br label %finished
finished:
  %pblock_size = getelementptr i8, ptr %slot, i64 8
  %block_size = load i64, ptr %pblock_size
  store i64 %block_size, ptr %block
  %replaced = atomicrmw xchg ptr @spare, ptr %block acq_rel   ; another thread's launch may have left its own
  call void @free(ptr %replaced)
  call void @PyEval_RestoreThread(ptr %state)
  %j8 = getelementptr %Job, ptr %job, i32 0, i32 8
  %message = load atomic ptr, ptr %j8 acquire, align 8
  br label %leave
leave:
  %outcome = phi ptr [ null, %size ], [ %message, %finished ]
  %pexit = getelementptr ptr, ptr %arguments, i64 8
  %exit = load ptr, ptr %pexit
  %no_exit = icmp eq ptr %exit, %none
  br i1 %no_exit, label %report, label %call_exit
call_exit:
  %exited = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %exit, ptr %meta, ptr null)
  %exit_failed = icmp eq ptr %exited, null
  br i1 %exit_failed, label %raise, label %drop_exit
drop_exit:
  call void @Py_DecRef(ptr %exited)
  br label %report
report:
  %fine = icmp eq ptr %outcome, null
  br i1 %fine, label %return, label %failure
failure:
  %re = load ptr, ptr @error_type
  %e1 = call ptr (ptr, ptr, ...) @PyErr_Format(ptr %re, ptr @failed_message, ptr %name, ptr %outcome)
  ret ptr null
return:
  call void @Py_IncRef(ptr %none)
  ret ptr %none
}

//! What the backend asks of a GPU. Kernels, launches and memory go through this and nothing else.

use engine::BackendError;

type Result<T> = std::result::Result<T, BackendError>;

/// A GPU, or what stands in for one. Launches of one queue run in their order, each seeing all writes of those before.
pub trait Device: Send + Sync + Sized + 'static {
    /// Memory that the processor and the kernels share.
    type Buffer: Send + Sync;
    /// A kernel's compiled source.
    type Library: Send + Sync;
    /// A kernel with its function constants, ready to launch.
    type Pipeline: Send + Sync;
    /// An order of launches.
    type Queue: Send;
    /// Launches that were handed over together.
    type Ticket: Send;

    /// For banners: its name, its kernel class and what else matters.
    fn describe(&self) -> String;

    /// Bytes of the largest buffer.
    fn largest_buffer(&self) -> usize;

    /// Bytes of a page: no-copy buffers begin and end at one.
    fn page(&self) -> usize;

    /// Zeroed memory; at least one byte.
    fn allocate(&self, bytes: usize, purpose: &'static str) -> Result<Self::Buffer>;

    /// A buffer over memory as it lies, for kernels that only read; `None` if the device cannot.
    ///
    /// # Safety
    /// `bytes` readable bytes from `start` on, both multiples of a page, stay as they are while the buffer lives.
    unsafe fn share(&self, start: *const u8, bytes: usize) -> Option<Self::Buffer>;

    /// Compiles the source of a kernel; `tensors` says whether it needs the operations on tensors of Metal 4.
    fn library(&self, kernel: &'static str, source: &str, tensors: bool) -> Result<Self::Library>;

    /// The kernel with these function constants, by index.
    fn pipeline(&self, library: &Self::Library, constants: &[i32]) -> Result<Self::Pipeline>;

    /// A new queue.
    fn queue(&self) -> Result<Self::Queue>;

    /// Appends a launch.
    fn launch(&self, queue: &mut Self::Queue, launch: Launch<'_, Self>) -> Result<()>;

    /// Hands over what was launched.
    fn commit(&self, queue: &mut Self::Queue) -> Result<Self::Ticket>;

    /// Waits until the device is done with it.
    fn wait(&self, ticket: Self::Ticket) -> Result<()>;

    /// Bytes of a buffer that [`Self::allocate`] made.
    fn bytes(&self, buffer: &Self::Buffer) -> usize;

    /// Copies into a buffer that the device does not use at the moment; panics outside of it.
    fn write(&self, buffer: &Self::Buffer, at: usize, bytes: &[u8]);

    /// Copies out of a buffer that the device does not write at the moment; panics outside of it.
    fn read(&self, buffer: &Self::Buffer, at: usize, out: &mut [u8]);
}

/// Part of a buffer.
pub struct Slice<'a, D: Device> {
    /// Which.
    pub buffer: &'a D::Buffer,
    /// Bytes from its beginning.
    pub offset: usize,
    /// Bytes of the part: no kernel that is given it touches more.
    pub bytes: usize,
}

impl<D: Device> Clone for Slice<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Slice<'_, D> {}

impl<'a, D: Device> Slice<'a, D> {
    /// A whole buffer that the device made.
    pub fn whole(device: &D, buffer: &'a D::Buffer) -> Self {
        Slice { buffer, offset: 0, bytes: device.bytes(buffer) }
    }

    /// From `at` on.
    pub fn from(self, at: usize) -> Self {
        Slice { offset: self.offset + at, bytes: self.bytes - at, ..self }
    }
}

/// What a kernel's parameter with a buffer index gets.
pub enum Argument<'a, D: Device> {
    /// Memory.
    Memory(Slice<'a, D>),
    /// Numbers, by value.
    Words(&'a [i32]),
}

/// A kernel over a grid of threadgroups.
pub struct Launch<'a, D: Device> {
    /// The kernel.
    pub pipeline: &'a D::Pipeline,
    /// By buffer index.
    pub arguments: &'a [Argument<'a, D>],
    /// Bytes of threadgroup memory, a multiple of 16.
    pub shared: usize,
    /// Threadgroups.
    pub grid: [usize; 3],
    /// Threads of each, a multiple of 32.
    pub threads: usize,
}

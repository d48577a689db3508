//! The Metal backend: evaluates batches on an Apple GPU with this crate's own kernels (`kernels/*.metal`).
//!
//! Reading order: [`MetalBackend`] lays a batch out (`step`), queues the forward pass (`forward`) through one function an
//! operation (`kernels`), and reads the answers back (`rows`); `weights` makes the mapped file visible to the device.
//!
//! All of it is written against [`Device`], which has two implementations: `bridge` talks to Metal and exists on macOS;
//! `emulator` executes the same kernels on the processor, checks every access to memory, and exists in tests. Nothing
//! here has run on an Apple GPU yet: docs/metal.md says what was checked and how.

mod backend;
#[cfg(target_os = "macos")]
mod bridge;
mod device;
mod forward;
mod kernels;
mod probe;
mod project;
mod rows;
mod step;
mod weights;

#[cfg(test)]
mod emulator;
#[cfg(test)]
mod tests;

pub use backend::{MetalBackend, MetalModel, Options};
#[cfg(target_os = "macos")]
pub use bridge::{Gpu, devices};
pub use device::{Argument, Device, Launch, Slice};
pub use kernels::Class;

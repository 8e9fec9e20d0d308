// torch's CPU wheel has no CUDA device guard and no CUDA hooks, without which autograd aborts on the first fake CUDA
// tensor. This library registers both. It has no driver and no memory: code that really touches a device still fails.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceType;
using c10::Stream;

const Device kFirst(DeviceType::CUDA, 0);

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kFirst; }
  Device getDevice() const override { return kFirst; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, kFirst); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isBuilt() const override { return true; }
};

}  // namespace

namespace at {
using CUDAHooks = Hooks;  // torch looks the hooks up by this name
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// A CPU build always answers "none". This library is loaded before libtorch_cpu, so its symbol is found first;
// autograd's engine calls it to find the stream of each node.
namespace at::accelerator {
C10_EXPORT std::optional<c10::DeviceType> getAccelerator(bool) {
  return DeviceType::CUDA;
}
}  // namespace at::accelerator

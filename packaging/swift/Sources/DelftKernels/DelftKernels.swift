// The kernels that the plugin built into this package.

#if canImport(Metal)
    import Foundation
    import Metal

    extension Kernels {
        /// The package's own kernels on a device.
        public static func packaged(for device: MTLDevice) throws -> Kernels {
            guard let folder = Bundle.module.resourceURL else {
                throw KernelError("DelftKernels", expected: "a bundle with kernels", found: "none")
            }
            return try Kernels(device: device, folder: folder)
        }
    }
#endif

// swift-tools-version: 6.0
// Delft's kernels for programs in Swift: the plugin runs `tile build`, whose Swift files, libraries
// and manifest become part of `DelftKernels`. See docs/inside/kernels.md.

import PackageDescription

let package = Package(
    name: "DelftKernels",
    platforms: [.macOS(.v15), .iOS(.v18)],
    products: [.library(name: "DelftKernels", targets: ["DelftKernels"])],
    targets: [
        .target(name: "DelftKernels", plugins: ["TileBuild"]),
        .plugin(name: "TileBuild", capability: .buildTool()),
    ]
)

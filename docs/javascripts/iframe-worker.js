// The search runs in a Worker, which browsers refuse to start from file:// pages. There, run its script in a hidden frame
// instead. The search's script recognises this case by the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = (this.scope = frame.contentWindow);
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.src = new URL(source, document.baseURI);
          script.onload = resolve;
          script.onerror = () => reject(new Error(`${source} could not be loaded`));
          scope.document.body.append(script);
        });
      // In the frame, these two behave as in a worker, except that importScripts returns a promise.
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      scope.importScripts = (...sources) =>
        sources.reduce((done, source) => done.then(() => load(source)), Promise.resolve());
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }
  };
}
